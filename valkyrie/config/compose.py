"""Extends Hydra with schemas, with meshes and targets that need no file, and with resolvers for default choices."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getsourcefile
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # public ConfigLoaders cannot take another folder
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from valkyrie.checkpoint import CheckpointConfig
from valkyrie.config.choices import Chips, choice_names, get_target
from valkyrie.config.files import check_folder, use_checked_files
from valkyrie.config.modes import MODES
from valkyrie.config.refusals import problem_from_error
from valkyrie.config.run import FAMILIES, RunConfig
from valkyrie.data.config import default_cache_dir
from valkyrie.extensions import Families
from valkyrie.hardware.chips import CHIP_GROUP
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform, platforms
from valkyrie.hardware.slices import even_shape, format_shape, parse_shape
from valkyrie.hardware.target import AUTO_TARGET, ChipConfig, TargetConfig
from valkyrie.parallel.mesh import MeshConfig, mesh_from_environment, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.remat import RematConfig, load_remat
from valkyrie.paths import conf_dir, config_files, read_defaults
from valkyrie.precision import PolicyConfig
from valkyrie.problems import first_line
from valkyrie.processes.distributed import DistributedConfig
from valkyrie.runs.wandb_writer import TrackingConfig

SCHEMAS: dict[str, type] = {
    "mesh": MeshConfig,
    "partition": PartitionConfig,
    "remat": RematConfig,
    "precision": PolicyConfig,
    "target": TargetConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "distributed": DistributedConfig,
}
"""Dataclasses of config groups with a single schema. Their YAMLs begin with `defaults: [GROUP_schema, _self_]`."""
GROUPS = (*FAMILIES, *SCHEMAS)
"""Every config group with a schema. The YAMLs of `FAMILIES` begin with `defaults: [FAMILY_schema, _self_]`."""
SCHEMAS_BY_PATH: dict[str, type] = {
    "run_schema": RunConfig,
    "target/chip/chip_schema": ChipConfig,
    **{f"{group}/{group}_schema": schema for group, schema in SCHEMAS.items()},
}
"""Schema dataclasses by config path, except those of `FAMILIES`.

`ValkyrieSource.list` omits them, because users never select a schema.
"""

AS_SAVED = "as_saved"
"""Choice of a group, such as `mesh=as_saved`, with the settings of the saved run. `--help` does not list it."""
saved_groups: dict[str, DictConfig] = {}
"""Maps each group to the config of its choice `as_saved`.

A config has a defaults list with the schema, and the saved settings.
"""
ENVIRONMENT_MESH = "environment"
"""`mesh=environment` is the mesh that the variables `TPU_MESH_CONFIG` and `TPU_AXIS_NAMES` describe."""
BY_WIDTH = "by_width"
"""Default choice of `remat`: `full` or `none`, by the model's width (`default_remat`). `--help` does not list it."""
SIMULATED_MESH = "2x2x2"
"""The default mesh on a machine without an accelerator: eight simulated CPU devices, two on each axis."""


class ValkyrieSource(ConfigSource):
    """Hydra source of configs without a file: meshes of any shape, targets by name, schemas, and saved settings."""

    @staticmethod
    def scheme() -> str:
        """Return the URL scheme of this source in the primary config's search path."""
        return "valkyrie"

    def available(self) -> bool:
        """Return True, as this source needs no files."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether this source has configs in a group."""
        return config_path in ("", "target/chip", *GROUPS)

    def is_config(self, config_path: str) -> bool:
        """Return whether this source has a config at this path.

        Hydra calls this only for choices without a file. Every name in `target` counts, because `load_config` suggests
        the nearest target for an unknown name.
        """
        path = config_path.removesuffix(".yaml")
        group, _, name = path.partition("/")
        is_mesh = group == "mesh" and (name[:1].isdigit() or name == ENVIRONMENT_MESH)
        is_target = group == "target" and name != "" and "/" not in name
        is_family = group in FAMILIES and name.endswith("_schema") and name.removesuffix("_schema") in FAMILIES[group]
        is_saved = name == AS_SAVED and group in saved_groups
        is_default = path == f"remat/{BY_WIDTH}"
        return is_mesh or is_target or path in SCHEMAS_BY_PATH or is_family or is_saved or is_default

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config at a path.

        Raises ConfigCompositionException for an invalid mesh or target, with a message that suggests a valid one, and
        for a `Config` class that OmegaConf rejects.
        """
        path = config_path.removesuffix(".yaml")
        group, _, name = path.partition("/")
        try:
            if path in SCHEMAS_BY_PATH:
                config = OmegaConf.structured(SCHEMAS_BY_PATH[path])
            elif name == AS_SAVED:
                config = saved_groups[group].copy()
            elif group == "target":
                config = _target_config(name)
            elif group == "remat":
                settings = {
                    "name": "${valkyrie.default_remat:${model.embed}}",
                    "save": "${valkyrie.default_save:${model.embed}}",
                }
                config = OmegaConf.create({"defaults": ["remat_schema", "_self_"], **settings})
            elif group == "mesh":
                config = OmegaConf.structured(_mesh_config(name))
            else:
                config = _family_schema(FAMILIES[group], name.removesuffix("_schema"))
        except ValueError as error:
            raise ConfigCompositionException(str(error)) from None
        return ConfigResult(
            config=_allow_new_rules(config),
            path=f"valkyrie://{config_path}",
            provider=self.provider,
            header={"package": None},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the choices that Hydra shows at a path: groups at the root, example targets in `target`, else none.

        The groups are `mesh` and those in `FAMILIES`. The targets are `cpu8` and one per chip. `results_filter` keeps
        only groups or only configs. Meshes are not listed because there are too many, and schemas because only YAML
        files refer to them.
        """
        if config_path == "target" and results_filter is not ObjectType.GROUP:
            return ["cpu8", *(f"{chip}-8" for chip in choice_names(CHIP_GROUP))]
        return ["mesh", *FAMILIES] if config_path == "" and results_filter is not ObjectType.CONFIG else []


def register() -> Path:
    """Register `ValkyrieSource`, `CheckedFiles`, the sweeper and the resolvers. Returns the folder of config groups.

    Raises RuntimeError if the folder is missing from the installation.
    """
    Plugins.instance().register(ValkyrieSource)
    sweeper_config = {"_target_": "hydra_plugins.valkyrie_sweeper.GridSweeper", "max_batch_size": None, "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="basic", node=sweeper_config, provider="valkyrie")
    use_checked_files()
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(f"valkyrie.{name}", resolver, replace=True)
        earlier_name = _EARLIER_NAMES.get(name, name)
        if not OmegaConf.has_resolver(earlier_name):  # keeps a resolver of this name that the user's program registered
            OmegaConf.register_new_resolver(earlier_name, resolver)
    folder = conf_dir()
    if not (folder / "train.yaml").is_file():
        raise RuntimeError(f"{folder / 'train.yaml'} is missing from this installation of Valkyrie. Install it again.")
    return folder


@contextmanager
def initialize_hydra(folders: Sequence[str], primary_folder: str | None = None) -> Iterator[None]:
    """Initialize Hydra in this context, with the user's config folders `folders` in its search path.

    `primary_folder` is the folder of the primary config, or None for the package's. It is searched first. Raises
    ValueError if one of `folders` does not exist, or has a file that a shipped file of the same name would hide
    (`check_folder`).
    """
    for folder in folders:
        check_folder(folder)
    conf_folder = register()
    with _suspend_hydra(), initialize_config_dir(primary_folder or str(conf_folder), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        for folder in folders:
            loader.config_search_path.prepend(
                "command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema")
            )
        loader.repository.initialize_sources(loader.config_search_path)
        yield


@contextmanager
def _suspend_hydra() -> Iterator[None]:
    """Clear Hydra's global state in this context, so that a run can be composed while a multirun composes its jobs."""
    running_hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running_hydra


def _divide(a: float | int, b: float | int) -> float:
    """Return a / b, or infinity if b is 0 or a / b overflows.

    Does not raise, so that the range check of the key that sets b can report its value.
    """
    try:
        return float(a) / float(b) if float(b) else math.inf
    except OverflowError:
        return math.inf


def tiny_or(size: str | None, tiny: str, else_: str) -> str:
    """Return `tiny` under `size=tiny`, else `else_`, the experiment's normal choice."""
    return tiny if size == "tiny" else else_


def default_mesh(target: str = AUTO_TARGET) -> str:
    """Return the name of the default mesh: the first of these that applies.

    - `environment`, if environment variables describe a mesh;
    - the topology of the target (or its number of chips), padded on the left with ones to three axes. The last axis is
      multiplied by the devices per chip. Simulated CPU devices are split evenly over three axes instead;
    - all accelerators of this machine on the last axis;
    - `2x2x2`, for simulated CPU devices.
    """
    mesh = mesh_from_environment()
    if mesh is not None:
        return ENVIRONMENT_MESH
    target_config = get_target(target)
    if target_config.chips is not None:
        sizes = parse_shape(target_config.topology) or (target_config.chips,)
        if get_platform(target_config.platform).runs_on_host:
            sizes = even_shape(target_config.chips, 3)
        last_size = sizes[-1] * (target_config.chip.devices if target_config.chip else 1)
        return format_shape((*[1] * (3 - len(sizes)), *sizes[:-1], last_size))
    count = 0 if get_platform(target_config.platform).runs_on_host else count_accelerators()
    return f"1x1x{count}" if count else SIMULATED_MESH


def default_partition(mesh: str | None = None) -> str:
    """Return the default partition: `data_model_fsdp` if `TPU_AXIS_NAMES` names the mesh axes, else `fsdp`.

    `fsdp` is the fastest of the partitions compared in valkyrie/search/README.md. `mesh` is the chosen mesh, or None.
    Environment variables are ignored if a mesh other than `environment` was chosen.
    """
    if mesh not in (None, ENVIRONMENT_MESH):
        return "fsdp"
    environment = mesh_from_environment()
    return "data_model_fsdp" if environment is not None and environment.names is not None else "fsdp"


def default_remat(embed: int) -> str:
    """Return the default rematerialisation: `full` if the model is at least 2048 wide, else `none`."""
    return "full" if embed >= 2048 else "none"


def default_save(embed: int) -> list[str]:
    """Return the names of the activations that the default rematerialisation saves on the device."""
    return load_remat(default_remat(embed)).save


def default_precision(target: str = AUTO_TARGET) -> str:
    """Return the default precision policy: `bf16_mixed` on accelerators, `float32` on simulated devices."""
    is_simulated = get_platform(get_target(target).platform).is_simulated(count_accelerators())
    return "float32" if is_simulated else "bf16_mixed"


def vocab_size_for(tokenizer: str | None, default: str) -> int:
    """Return the vocabulary size of a tokenizer: the one named `tokenizer`, or `default` if that is None.

    Raises ValueError for unknown names.
    """
    from valkyrie.data.config import VOCAB_SIZES

    name = tokenizer or default
    if name in VOCAB_SIZES:
        return VOCAB_SIZES[name]
    from valkyrie.data.tokenizer import read_vocab_size, tokenizer_errors

    with tokenizer_errors("data.tokenizer" if tokenizer else "model.tokenizer"):
        return read_vocab_size(name)


def tiny_model_for(experiment: str | None) -> str:
    """Return the tiny model that resembles the model of an experiment, or `valkyrie_tiny` without an experiment.

    Its name is the first word of the model's name, or else the model's family, followed by `_tiny`. Raises ValueError
    if the experiment is unknown or there is no such model.
    """
    if experiment is None:
        return "valkyrie_tiny"
    model = _choice_in_defaults("experiment", experiment, "override /model")
    family = _choice_in_defaults("model", model, "").removesuffix("_schema") if model else ""
    names = [f"{word}_tiny" for word in (model.split("_")[0], family) if word]
    for name in names:
        if name in config_files("model"):
            return name
    raise ValueError(
        f"size=tiny: there is no tiny model for experiment={experiment}. Leave out size=tiny and choose a small model: "
        "model=NAME."
    )


def _choice_in_defaults(group: str, name: str, key: str) -> str:
    """Return the choice for `key` in the defaults list of `GROUP/NAME.yaml`, or an empty string if there is none.

    If `key` is empty, returns the first entry without a key.
    """
    path = config_files(group).get(name)
    for entry in [] if path is None else read_defaults(path):
        if isinstance(entry, str) and not key:
            return entry
        if not isinstance(entry, str) and key in entry:
            return str(entry[key])
    return ""


def mode_help() -> str:
    """Return one line per mode for `--help`."""
    names = (*MODES.names(), *MODES.user_names())
    return "\n".join(f"  mode={name:12} {MODES.config_class(name).description}" for name in names)


def count_accelerators() -> int:
    """Count the accelerators of this host that JAX could use, from device files and without importing JAX."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 0
    counts = (len(platform.device_files()) for platform in platforms() if platform.is_installed())
    return next(filter(None, counts), 0)


def _allow_new_rules(config: DictConfig) -> DictConfig:
    """Let the command line set compiler options and partition rules that the config does not list, without `+`."""
    open_keys = {
        PartitionConfig: ("parameters", "activations"),
        ChipConfig: ("xla_options", "xla_options_until", "xla_options_from"),
    }
    for key in open_keys.get(OmegaConf.get_type(config) or type(config), ()):
        OmegaConf.set_struct(config[key], False)
    return config


def _mesh_config(name: str) -> MeshConfig:
    if name != ENVIRONMENT_MESH:
        return parse_mesh(name)
    mesh = mesh_from_environment()
    if mesh is None:
        raise ValueError("mesh=environment needs TPU_MESH_CONFIG, such as TPU_MESH_CONFIG=4,4,2.")
    return mesh


def _family_schema(families: Families, name: str) -> DictConfig:
    """Return the schema of a family. Raises ValueError if OmegaConf rejects the type or default of a field."""
    config_class = families.config_class(name)
    try:
        return OmegaConf.structured(config_class)
    except (OmegaConfBaseException, NameError, AttributeError, SyntaxError) as error:
        # The last three: the text of a type cannot be evaluated, for example if only type checkers import its module.
        reason = problem_from_error(error) if isinstance(error, OmegaConfBaseException) else f"{first_line(error)}."
        raise ValueError(f"{families.key}={name}: {getsourcefile(config_class)}: {reason}") from error


def _target_config(name: str) -> DictConfig:
    """Build the config that a YAML of this target would contain."""
    target = parse_target(name, Chips(), choice_names("target"))
    chip_entries = [] if target.chip is None else [f"chip/{target.chip.name}@chip"]
    values = {key: getattr(target, key) for key in ("name", "chips", "topology", "hosts")}
    default_entries = ["target_schema", *chip_entries, "_self_"]
    return OmegaConf.create({"defaults": default_entries, "platform": target.platform, **values})


_RESOLVERS: Mapping[str, Callable[..., object]] = {
    "divide": _divide,
    "tiny_or": tiny_or,
    "product": lambda a, b: int(a) * int(b),
    "by_width": lambda rate, width: float(rate) * (768 / width) ** 0.5,
    "quotient": lambda a, b: int(a) // max(int(b), 1),
    "round_up": lambda a, b: -(-int(a) // int(b)) * int(b),
    "least": lambda a, b: min(int(a), int(b)),
    "default_mesh": default_mesh,
    "default_partition": default_partition,
    "default_remat": default_remat,
    "default_save": default_save,
    "default_precision": default_precision,
    "default_cache_dir": default_cache_dir,
    "tiny_model_for": tiny_model_for,
    "vocab_size_for": vocab_size_for,
    "mode_help": mode_help,
}
"""The functions that YAMLs call as `${valkyrie.NAME:ARGUMENTS}`."""
_EARLIER_NAMES = {"tiny_or": "if_tiny", "tiny_model_for": "tiny_of", "vocab_size_for": "ids_of"}
"""Maps resolvers to their earlier names.

YAMLs of earlier versions use these, and the names of the other resolvers, without the prefix `valkyrie.`.
"""
