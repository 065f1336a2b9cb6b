"""Tests of `mode=explain`: its numbers add up, its sentences agree with them, and incomparable layouts are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import needs_libtpu
from runs import run_train
from valkyrie.compiled.communication import AxesBytes, CollectiveRecord, Communication
from valkyrie.config.run import Run
from valkyrie.hardware.platforms.tpu import Tpu
from valkyrie.parallel.partition import AccumulatedGradients, Role, RoleKind, SumGradientsPer
from valkyrie.parts import PartKind, StepPart
from valkyrie.records import write_record
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.prediction import (
    CompileStatus,
    ForeignProgram,
    MemoryReport,
    PredictedStep,
    Prediction,
    Recomputed,
    RematReport,
    StepInterval,
)
from valkyrie.search.compile.summary import model_settings
from valkyrie.search.explain import mode as explain_mode
from valkyrie.search.explain.difference import LETTERS, compare_layouts

ROLES = {
    "fsdp": {"x": Role(RoleKind.FSDP, ("batch", "embed")), "y": Role(RoleKind.unused)},
    "2d_tp": {"x": Role(RoleKind.MP1, ("mlp",)), "y": Role(RoleKind.MP2, ("embed",))},
}

OTHER_MODEL = LayoutRecord("other", "8x1", "fsdp", "v5e-8", layout="x")
FOREIGN = ForeignProgram("mine", "v5e-8", "v5e-8", "v5e", {"data": 8})


def prediction(partition: str = "fsdp", **seconds: float) -> Prediction:
    """Return the prediction of a compiled layout of gpt_tiny.

    `seconds` adds parts of the step to `matmul=0.3, memory=0.1`, or replaces these. A name is the kind of a part,
    followed by its mesh axes: `exposed_x` is exposed communication over x.
    """
    part_seconds = {"matmul": 0.3, "memory": 0.1} | seconds
    parts = [
        StepPart(PartKind(name.split("_")[0]), tuple(name.split("_")[1:]), value)
        for name, value in part_seconds.items()
    ]
    causes = tuple(
        CollectiveRecord("all-reduce", part.mesh_axes, (), f"jit(step)/{way}/down/dot_general",
                         "/x/valkyrie/models/layers.py:75", 12.0, 1e9, part.seconds, part.seconds / 2)
        for part in parts if part.kind is PartKind.exposed for way in ("jvp()/a/b", "transpose(jvp())/a/b")
    )  # fmt: skip
    record = LayoutRecord(
        "gpt_tiny", "8x1", partition, "v5e-8", batch=8, seq=64, precision="bf16", layout=f"8x1-{partition}",
        axis_roles=ROLES[partition],
    )  # fmt: skip
    return Prediction(
        about=record,
        status=CompileStatus.ok,
        model={"model.layers": "4", "model.embed": "64"},
        parts=tuple(parts),
        step=PredictedStep(sum(part_seconds.values()), executed_flops=4e12, model_flops=3e12, product_rate=0.7),
        communication=Communication(
            bytes_by_mesh_axes=tuple(AxesBytes(use.mesh_axes, 2e9) for use in causes[::2]), collectives=causes
        ),
        memory=MemoryReport(peak=3 * 2**30, split={"parameters": 2**30, "activations and temporaries": 2 * 2**30}),
        remat=RematReport(again=(Recomputed("up", 1, 0.05),)),
    )


def replace_fields(original: Prediction, about: dict[str, Any] | None = None, **step: Any) -> Prediction:
    """Return a prediction with fields of its layout's record and of its step replaced."""
    assert original.step is not None
    return replace(original, about=replace(original.layout, **(about or {})), step=replace(original.step, **step))


def test_parts_add_up_to_the_steps_and_their_differences() -> None:
    comparison = compare_layouts(
        prediction(exposed_x=0.05), prediction("2d_tp", exposed_x=0.5, exposed_y=0.7, kernel=0.1)
    )
    assert sum(part.first for part in comparison.seconds) == pytest.approx(comparison.step_s[0])
    assert sum(part.excess for part in comparison.seconds) == pytest.approx(comparison.step_s[1] - comparison.step_s[0])
    assert [abs(part.excess) for part in comparison.seconds] == sorted(
        (abs(part.excess) for part in comparison.seconds), reverse=True
    )
    by_axis = {part.name.rpartition(" over ")[2]: (part.first, part.second) for part in comparison.seconds}
    assert by_axis["x (FSDP)"] == (0.05, 0.0)
    assert by_axis["x (MP1)"] == (0.0, 0.5), "one mesh axis with two roles is two parts"
    (use,) = comparison.collectives[0]
    assert (use.calls, use.bytes, use.waited_s) == (24.0, 2e9, pytest.approx(0.05)), "both passes are one"


def test_sentences_agree_with_the_numbers() -> None:
    slow = prediction("2d_tp", exposed_y=1.2)
    comparison = compare_layouts(prediction(), slow)
    assert comparison.sentences[0].startswith("A is 4.00")
    assert all(part in comparison.sentences[1] for part in ("100%", "1.200 s per step under B", "over y (MP2)"))
    turned = compare_layouts(slow, prediction())
    assert turned.sentences[0].startswith("B is 4.00")


def test_sums_of_gradients_are_explained_if_microbatches_accumulate_them() -> None:
    once, often = (
        replace(prediction(exposed_x=seconds), gradients=AccumulatedGradients(per, 2**30))
        for per, seconds in ((SumGradientsPer.step, 0.1), (SumGradientsPer.microbatch, 0.8))
    )
    text = " ".join(compare_layouts(often, once, labels=LETTERS).sentences)
    assert "per step under B" in text and "per microbatch under A" in text
    hybrid = replace(once, gradients=AccumulatedGradients(SumGradientsPer.hybrid, 2**30, ("s",)))
    assert "over s once per step under B" in " ".join(compare_layouts(often, hybrid, labels=LETTERS).sentences)
    assert "per microbatch under A" in " ".join(compare_layouts(often, prediction(), labels=LETTERS).sentences)
    assert "Gradients" not in " ".join(
        compare_layouts(prediction(), prediction(exposed_x=0.1), labels=LETTERS).sentences
    )


def test_recomputed_and_saved_activations_are_explained() -> None:
    full = prediction()
    remat_dots = replace_fields(prediction(matmul=0.2), {"layout": "8x1-fsdp-remat_dots"}, executed_flops=3e12)
    temporaries = "activations and temporaries"
    split = {"parameters": 2**30, temporaries: 6 * 2**30}
    remat_dots = replace(remat_dots, remat=RematReport(), memory=MemoryReport(peak=7 * 2**30, split=split))
    text = " ".join(compare_layouts(full, remat_dots).sentences)
    assert "executes 1.00 times" in text and "1.33 under A" in text
    assert "B saves: up." in text
    assert f"{temporaries}: 6.0 GiB" in text and "2.0 GiB." in text


def test_a_difference_within_the_prediction_error_is_pointed_out() -> None:
    interval = StepInterval(0.0, 0.0, low=0.9, high=1.1)
    first = replace_fields(prediction(), interval=interval)
    second = replace_fields(prediction(kernel=0.01), {"layout": "another"}, interval=interval)
    assert "other way round" in compare_layouts(first, second).sentences[1]
    first, second = (replace_fields(each, {"chip": "v5e"}, interval=interval) for each in (first, second))
    assert "surer" in compare_layouts(first, second).sentences[1], "errors of one chip are shared"


def test_different_batches_are_scaled_to_equal_tokens() -> None:
    unknown = compare_layouts(prediction(), replace_fields(prediction(kernel=0.4), {"batch": None}))
    assert (
        unknown.step_s[1] == pytest.approx(prediction(kernel=0.4).step.step_s) and "scaled" not in unknown.sentences[0]
    )
    comparison = compare_layouts(prediction(), replace_fields(prediction(kernel=0.4), {"batch": 16}))
    assert comparison.step_s[1] == pytest.approx(0.4) and comparison.names == ("8x1-fsdp batch=8", "8x1-fsdp batch=16")
    assert "512 tokens" in comparison.sentences[0]


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, ("8x1-fsdp", "second=")),
        ({"about": LayoutRecord("other", "8x1", "fsdp", "v5e-8", layout="x")}, (" gpt_tiny ", " other")),
        (
            {"status": CompileStatus.does_not_fit, "reason": "needs 3 GiB"},
            ("second= (8x1-fsdp)", "does not fit", "3 GiB"),
        ),
        ({"program": FOREIGN}, ("second= ", " mine")),
        (
            {"model": {"model.layers": "8", "model.embed": "64"}},
            ("gpt_tiny model.layers=4 ", "gpt_tiny model.layers=8"),
        ),
        ({"step": None}, ("second= (8x1-fsdp)", "target=v4-64")),
    ],
)
def test_incomparable_layouts_are_refused(changes: dict[str, Any], values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        compare_layouts(prediction(), replace(prediction(), **changes))
    assert all(value in str(error.value) for value in values)


def test_layouts_with_equal_names_are_distinguished_by_their_overrides() -> None:
    overrides = ("model.s5.scan=kernel partition=fsdp", "model.s5.scan=blocked partition=fsdp")
    comparison = compare_layouts(prediction(), prediction(kernel=0.1), overrides)
    assert comparison.names == ("8x1-fsdp model.s5.scan=kernel", "8x1-fsdp model.s5.scan=blocked")
    first, other = (replace(prediction(), module_sha256=digest) for digest in "ab")
    assert len({*compare_layouts(first, other, overrides).step_s}) == 1
    with pytest.raises(ValueError, match=r"^first='model\.s5\.scan=kernel .* second=.*, 8x1-fsdp\b"):
        compare_layouts(first, first, overrides)


def test_all_reasons_against_a_comparison_are_reported_at_once() -> None:
    failed = replace(prediction(), status=CompileStatus.failed, reason="why")
    with pytest.raises(ValueError, match=r"^first= .*\(failed\): why\nsecond= .*\(failed\): why$"):
        compare_layouts(failed, failed)


@pytest.mark.parametrize(
    ("peaks", "parameters", "names_parameters"),
    [
        ((3.0, 3.0), (1.0, 0.0), False),
        ((3.0, 4.0), (2.0, 1.0), False),
        ((3.0, 5.0), (1.0, 1.5), False),
        ((3.0, 5.0), (1.0, 2.5), True),
    ],
)
def test_the_memory_category_with_most_of_the_difference_is_named(
    peaks: tuple[float, float], parameters: tuple[float, float], names_parameters: bool
) -> None:
    memories = [
        MemoryReport(peak=int(peak * 2**30), split={"parameters": int(size * 2**30)})
        for peak, size in zip(peaks, parameters, strict=True)
    ]
    both = replace(prediction(), memory=memories[0]), replace(prediction(kernel=0.1), memory=memories[1])
    (sentence,) = [s for s in compare_layouts(*both, ("a", "b")).sentences if "GiB" in s]
    sizes = [*peaks, *(parameters if names_parameters else ())]
    assert re.findall(r"[\d.]+ GiB", sentence) == [f"{size:.1f} GiB" for size in sizes]
    assert ("parameters" in sentence) is names_parameters


@pytest.mark.parametrize("sizes", [(3, 5), (180, 250)])
def test_memory_sizes_that_differ_have_a_unit_that_shows_it(sizes: tuple[int, int]) -> None:
    memories = [MemoryReport(peak=size * 2**20, split={"parameters": size * 2**20}) for size in sizes]
    both = replace(prediction(), memory=memories[0]), replace(prediction(kernel=0.1), memory=memories[1])
    (sentence,) = [s for s in compare_layouts(*both, ("a", "b")).sentences if "MiB" in s]
    assert [sentence.count(f"{size:.1f} MiB") for size in sizes] == [2, 2]


def write_folder(compiled: Prediction, folder: Path) -> str:
    folder.mkdir()
    write_record(folder / "compile.json", compiled)
    return str(folder)


def test_two_run_folders_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = write_folder(replace(prediction(), memory=MemoryReport(peak=3 * 2**30)), tmp_path / "one")
    second = write_folder(prediction("2d_tp", exposed_y=1.2), tmp_path / "other")
    assert run_train("mode=explain", f"first={first}", f"second={second}", f"runs={tmp_path}", "name=why") == 0
    output = capfd.readouterr().out
    assert "A is 4.00" in output and "+1.200 s" in output
    record = json.loads((tmp_path / "why" / "explain.json").read_text())
    assert record["step_s"] == pytest.approx([0.4, 1.6]) and record["names"] == ["8x1-fsdp", "8x1-2d_tp"]
    assert run_train("mode=explain", f"first={first}", f"second={second}", f"runs={tmp_path}") == 0
    assert (tmp_path / "explain-gpt_tiny-8x1-fsdp-8x1-2d_tp" / "explain.json").is_file(), "of what was compared"


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (("first=partition=fsdp",), ["Set both first= and second="]),
        (("first=", "second=partition=fsdp"), ["first= has no value"]),
        (('first="partition=\'fsdp"', "second=partition=fsdp"), ["partition='fsdp: "]),
        (("first=partition=fsdp", "second=partition=fsdp"), ["first=", "second=", "'partition=fsdp'"]),
        (("first=no/such/folder", "second=partition=fsdp"), ["no/such/folder "]),
        (("first=partition=nothing", "second=partition=fsdp"), ["nothing"]),
        (
            ("first=[partition=dp, mesh=2x2x1]", "second=partition=pp,batch=8"),
            ["of a layout with spaces: 'partition=dp mesh=2x2x1'.", "spaces: 'partition=pp batch=8'."],
        ),
        (
            ("first=mesh=3x1x1 partition=fsdp", "second=mesh=5x1x1 steps=0", "target=cpu8"),
            ["mesh=3x1x1 partition=fsdp: ", "mesh=5x1x1 steps=0: steps=0: ", "target=cpu8 "],
        ),
        (("first=model.layers=2", "second=model.layers=3"), ["gpt_tiny model.layers=2 ", "gpt_tiny model.layers=3"]),
        (("first=partition=fsdp", "second=seed=0"), ["second='seed=0'"]),
        (("first=partition=fsdp", "second=mode=search"), ["mode=search: a layout cannot set mode."]),
        (("first=partition=fsdp", "second=partition=fsdp log_every=7"), ["are the same layout"]),
        (("first=partition=fsdp", "second=partition=fsdp_tp", "mesh=8x1x1"), ["on mesh=8x1x1: ", "as mesh=1x8x1."]),
        (("first=partition=fsdp", "second=partition=fsdp_tp", "mesh=1x1x8"), ["on mesh=1x1x8: ", "as mesh=1x8x1."]),
    ],
)
def test_an_invalid_pair_is_refused_before_a_compile(
    arguments: tuple[str, ...], values: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain_mode, "compile_and_summarise", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)
    assert run_train("mode=explain", "model=gpt_tiny", "target=v5e-8", "batch=8", *arguments) == 2
    output = capfd.readouterr().err
    assert all(value in output for value in values), output


def test_a_folder_without_a_step_is_refused_before_a_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain_mode, "compile_and_summarise", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)
    foreign = write_folder(Prediction(None, CompileStatus.ok, program=FOREIGN), tmp_path / "foreign")
    arguments = ("mode=explain", "model=gpt_tiny", "target=v5e-8", "batch=8", "second=partition=fsdp")
    assert run_train(*arguments, f"first={foreign}") == 2
    assert re.search(r": first= .* mine\b", capfd.readouterr().err)


def test_different_implementations_of_one_model_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def compiled(run: Run, console: Any) -> tuple[None, Prediction, None]:
        one = prediction(kernel=0.1 if "blocked" in run.values()["model.s5.scan"] else 0.0)
        return None, replace(one, model=model_settings(run)), None

    monkeypatch.setattr(explain_mode, "compile_and_summarise", compiled)
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)
    arguments = ("model=s5_tiny", "target=v5e-8", "batch=8", f"runs={tmp_path}", "name=why")
    assert run_train("mode=explain", *arguments, "first=model.s5.scan=kernel", "second=model.s5.scan=blocked") == 0
    output = capfd.readouterr().out
    assert "A: 8x1-fsdp model.s5.scan=kernel" in output and "A is 1.25" in output


def test_a_folder_without_a_compile_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train("mode=explain", f"first={tmp_path}", "second=partition=fsdp") == 2
    assert "no compile.json" in capfd.readouterr().err


def test_a_damaged_compile_names_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compile.json").write_text('{"about": 3, "status": "ok"}')
    assert run_train("mode=explain", f"first={tmp_path}", "second=partition=fsdp") == 2
    error = capfd.readouterr().err
    assert str(tmp_path / "compile.json") in error and "valkyrie-train mode=compile" in error


@pytest.mark.slow
@needs_libtpu
def test_two_layouts_are_compiled_and_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("target=v4-8", "model=s5_tiny", "batch=8", "seq=64", f"runs={tmp_path}", "name=why")
    assert (
        run_train("mode=explain", *arguments, "first=mesh=4x1x1 partition=fsdp", "second=mesh=2x2x1 partition=2d_tp")
        == 0
    )
    record = json.loads((tmp_path / "why" / "explain.json").read_text())
    for i, key in enumerate(("first", "second")):
        assert sum(part[key] for part in record["seconds"]) == pytest.approx(record["step_s"][i])
    assert any("(MP2)" in part["name"] for part in record["seconds"])
    assert capfd.readouterr().out.count("times as fast") == 1
