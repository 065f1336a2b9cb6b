"""Tests of Sudoku data: puzzles have one solution, symmetries preserve it, and bad puzzles are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import compose_config, compose_run
from valkyrie.config.run import Run
from valkyrie.data.batches import Dataset, make_loader
from valkyrie.data.sources.puzzles.folder import open_puzzles
from valkyrie.data.sources.puzzles.generate import canonical_forms, count_guesses, count_solutions, generate
from valkyrie.data.sources.puzzles.loader import NO_LABEL
from valkyrie.data.sources.puzzles.prepare import write_folder
from valkyrie.data.sources.puzzles.symmetries import draw_symmetries
from valkyrie.problems import ProblemCode
from valkyrie.train.prepare import refuse_unsuitable_data

HARD = "85...24..72......9..4.........1.7..23.5...9...4...........8..7..17..........36.4."
"""A published puzzle that a solver cannot complete without guesses."""


def grid(text: str) -> np.ndarray:
    return np.array([[int(cell) for cell in text.replace(".", "0")]])


def is_solution(grids: np.ndarray, side: int) -> bool:
    """Return whether all rows, columns and boxes contain each digit once."""
    box = int(side**0.5)
    square = grids.reshape(-1, side, side)
    boxes = grids.reshape(-1, box, box, box, box).swapaxes(2, 3).reshape(-1, side, side)
    return all((np.sort(u, 2) == np.arange(1, side + 1)).all() for u in (square, square.swapaxes(1, 2), boxes))


@pytest.mark.parametrize(("side", "count", "clues"), [(4, 60, 6), (9, 2, 0)])
def test_generated_puzzles_have_one_solution(side: int, count: int, clues: int):
    puzzles = generate(np.random.default_rng(0), count, side, clues)
    assert is_solution(puzzles.solutions, side)
    clue_cells = puzzles.givens > 0
    assert (puzzles.solutions[clue_cells] == puzzles.givens[clue_cells]).all()
    assert (count_solutions(puzzles.givens, side) == 1).all()
    assert (clue_cells.sum(1) == clues).all() if clues else clue_cells.sum(1).max() < 32
    if not clues:  # none can lose another clue
        row, cells = puzzles.givens[:1], np.flatnonzero(puzzles.givens[0])
        one_clue_removed = np.repeat(row, len(cells), axis=0)
        one_clue_removed[np.arange(len(cells)), cells] = 0
        assert (count_solutions(one_clue_removed, side) == 2).all()
    again = generate(np.random.default_rng(0), count, side, clues)
    assert all((a == b).all() for a, b in zip(puzzles, again, strict=True))


def test_a_hard_puzzle_needs_guesses_and_an_empty_one_has_many_solutions():
    assert count_solutions(grid(HARD), 9) == 1
    assert count_guesses(grid(HARD), 9) > 3
    assert count_solutions(np.zeros((1, 16), int), 4, max_solutions=400) == 288
    twice = grid("11" + 79 * ".")
    assert count_solutions(twice, 9) == 0


@pytest.mark.parametrize("side", [4, 9])
def test_symmetries_map_solutions_to_solutions(side: int):
    puzzles = generate(np.random.default_rng(1), 4, side)
    symmetries = draw_symmetries(np.random.default_rng(0), 40, side)
    rows = np.arange(40) % 4
    solutions, givens = (symmetries.apply(cells[rows] + 1) - 1 for cells in (puzzles.solutions, puzzles.givens))
    assert is_solution(solutions, side)
    assert (count_solutions(givens, side) == 1).all()
    assert len(np.unique(solutions, axis=0)) > 35
    if side == 4:
        assert canonical_forms(givens, 4) == [canonical_forms(puzzles.givens, 4)[row] for row in rows]


def config(*overrides: str) -> Any:
    return compose_run("model=trm_tiny", *overrides).config.data


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("cache")
    return "data=sudoku_4x4", "data.sudoku.train=30", "data.sudoku.validation=10", f"data.cache_dir={folder}"


def test_puzzles_are_generated_once_and_validation_puzzles_are_new(settings: tuple[str, ...], monkeypatch: Any):
    first = config(*settings).open("none")
    monkeypatch.setattr("valkyrie.data.sources.puzzles.prepare.generate", None)
    assert config(*settings).open("none").path == first.path
    train, validation = (split.inputs.astype(int) - 1 for split in (first.train, first.validation))
    assert (len(train), len(validation)) == (30, 10)
    assert not set(canonical_forms(train, 4)) & set(canonical_forms(validation, 4))
    with pytest.raises(TypeError, match="NoneType"):
        config(*settings, "data.sudoku.seed=1").open("none")


def load_batches(settings: tuple[str, ...], split: str, rows: list[int], count: int, skip: int = 0) -> list[Any]:
    data, options = config(*settings).open("none"), {"seed": 3, "repeat": split == "train", "rows": rows}
    with make_loader(data, split, batch=8, seq=16, **options) as loader:
        state = loader.state() | {"step": skip}
        loader.restore(state)
        return [next(loader) for _ in range(count)]


def test_the_batch_of_a_step_depends_only_on_its_number(settings: tuple[str, ...]):
    whole = load_batches(settings, "train", list(range(8)), 6)
    for part in ([0, 1, 2], [3, 4, 5, 6, 7]):
        part_batches = load_batches(settings, "train", part, 3, skip=3)
        assert all(
            (part_batches[i][name] == whole[3 + i][name][part]).all() for i in range(3) for name in part_batches[i]
        )
    shown_inputs = {row.tobytes() for batch in whole for row in batch["inputs"]}
    assert len(shown_inputs) > 40, "30 puzzles and their forms"
    plain = load_batches((*settings, "data.augment=false"), "train", list(range(8)), 6)
    assert len({row.tobytes() for batch in plain for row in batch["inputs"]}) == 30
    for batch in whole:
        assert (count_solutions(batch["inputs"] - 1, 4) == 1).all()
        assert is_solution(batch["labels"] - 1, 4)
    last = load_batches(settings, "validation", list(range(8)), 2)[1]
    assert (last["labels"] == NO_LABEL).all(1).tolist() == [False] * 2 + [True] * 6


def test_a_batch_has_one_puzzle_of_each_group(tmp_path: Path):
    inputs = np.repeat(np.arange(1, 7)[:, None], 4, axis=1)
    for name in ("train", "test"):
        write_folder(tmp_path / name, inputs, inputs, 7)
    np.save(tmp_path / "train" / "all__group_indices.npy", np.array([0, 4, 6]))
    np.save(tmp_path / "train" / "all__puzzle_identifiers.npy", np.array([0, 0, 0, 0, 1, 1]))
    description = json.loads((tmp_path / "train" / "dataset.json").read_text())
    (tmp_path / "train" / "dataset.json").write_text(json.dumps(description | {"num_puzzle_identifiers": 2}))
    data = open_puzzles(tmp_path, "arc")
    with make_loader(data, "train", batch=4, seq=4, repeat=True) as loader:
        for _ in range(5):
            batch = next(loader)
            assert sorted(batch["inputs"][:, 0] > 4) == [False, False, True, True]
            assert (batch["puzzles"] == (batch["inputs"][:, 0] > 4)).all()


def write_csv(folder: Path, rows: list[tuple[str, str]]) -> None:
    text = "source,question,answer,rating\n" + "".join(f"mine,{q},{a},{i}\n" for i, (q, a) in enumerate(rows))
    for name in ("train", "test"):
        (folder / f"{name}.csv").write_text(text)


def test_published_csv_is_read_once(tmp_path: Path):
    puzzles = generate(np.random.default_rng(0), 5, 4)
    texts = [("".join(map(str, q)).replace("0", "."), "".join(map(str, a))) for q, a in zip(*puzzles[:2], strict=True)]
    write_csv(tmp_path, texts)
    arguments = (
        "data=puzzles",
        f"data.paths=[{tmp_path}]",
        f"data.cache_dir={tmp_path}/cache",
        "data.sudoku.guesses=2",
    )
    data = config(*arguments).open("none")
    assert data.side == 4
    np.testing.assert_array_equal(data.train.inputs, puzzles.givens[2:] + 1)
    np.testing.assert_array_equal(data.train.labels, puzzles.solutions[2:] + 1)
    maze = "# S G o##"
    write_csv(tmp_path, [(maze, maze)] * 3)
    maze_config = config(*arguments, "data.sudoku.guesses=0")
    assert maze_config.shape() == (9, 6, 1)
    assert maze_config.open("none").side is None


REFUSED = {
    "another size": ([(81 * ".", 81 * "1")], "model.context=81 model.vocab_size=11"),
    "no square": ([(15 * ".", 15 * "1")], "train.csv line 2"),
    "rows of two sizes": ([(16 * ".", 16 * "1"), (16 * ".", 15 * "1")], "train.csv line 3"),
    "an accent": ([(16 * ".", 15 * "1" + "é")], "train.csv line 2: the answer "),
    "a strange digit": ([(16 * ".", 16 * "1"), (16 * "7", 16 * "1")], "puzzle 2 "),
    "no answer": ("question,rating\n", "column answer"),
    "no rating": ("question,answer,rating\n1,1,--5\n", "train.csv line 2: the rating '--5'"),
    "an open quote": ('question,answer,rating\n1,1,"' + 200_000 * "1" + "\n", "train.csv line . is not CSV"),
    "an open quote in the header": ('question,answer,"' + 200_000 * "1" + "\n", "train.csv line . is not CSV"),
    "nothing": (None, "train/dataset.json is missing"),
}
"""Invalid data and a part of the error message, by case.

The data are pairs of puzzle and answer, the text of a CSV file, or None for no file.
"""


def prepared(run: Run) -> Dataset:
    refuse_unsuitable_data(run)
    return run.config.data.open("none")


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_puzzles_are_refused(case: str, tmp_path: Path):
    rows, words = REFUSED[case]
    if isinstance(rows, str):
        for name in ("train", "test"):
            (tmp_path / f"{name}.csv").write_text(rows)
    elif rows:
        write_csv(tmp_path, rows)
    run = compose_run("model=trm_tiny", "data=puzzles", f"data.paths=[{tmp_path}]", f"data.cache_dir={tmp_path}/cache")
    with pytest.raises(ValueError, match=words):
        prepared(run)


def test_the_refusal_of_a_damaged_folder_names_the_file(tmp_path: Path):
    for name in ("train", "test"):
        write_folder(tmp_path / name, np.ones((3, 16), int), np.ones((3, 16), int), 6)
    file = tmp_path / "train" / "all__inputs.npy"
    np.save(file, np.full((3, 16), 6))
    with pytest.raises(ValueError, match="value 6, .*vocab_size=6"):
        open_puzzles(tmp_path, "mine")
    np.save(file, np.ones((3, 9), int))
    with pytest.raises(ValueError, match=r"9 cells, .*seq_len=16"):
        open_puzzles(tmp_path, "mine")
    np.save(file, np.ones((2, 16), int))
    with pytest.raises(ValueError, match="2 inputs, 3"):
        open_puzzles(tmp_path, "mine")
    np.save(file, np.ones((3, 16), int))
    np.save(tmp_path / "train" / "all__puzzle_identifiers.npy", np.array([0, -1, 0]))
    with pytest.raises(ValueError, match="identifier -1"):
        open_puzzles(tmp_path, "mine")
    np.save(tmp_path / "train" / "all__puzzle_identifiers.npy", np.zeros(3, int))
    metadata = tmp_path / "train" / "dataset.json"
    metadata_text = metadata.read_text()
    metadata.write_text(json.dumps(json.loads(metadata_text) | {"blank_identifier_id": 9}))
    with pytest.raises(ValueError, match=f"^{metadata} .*blank_identifier_id=9"):
        open_puzzles(tmp_path, "mine")
    metadata.write_text(metadata_text)
    file.write_bytes(b"no array")
    with pytest.raises(ValueError, match="all__inputs.npy is missing"):
        open_puzzles(tmp_path, "mine")


def test_settings_that_do_not_suit_the_puzzles_are_named(tmp_path: Path):
    for name in ("train", "test"):
        write_folder(tmp_path / name, np.ones((3, 16), int), np.ones((3, 16), int), 6)
    arguments = ("model=trm_tiny", "data=puzzles", f"data.paths=[{tmp_path}]", "model.puzzles=2")
    refuse_unsuitable_data(compose_run(*arguments))
    with pytest.raises(ValueError, match=r"Use seq=16\.$"):
        refuse_unsuitable_data(compose_run(*arguments, "seq=8"))
    metadata = tmp_path / "test" / "dataset.json"  # identifiers that only the validation puzzles have
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"num_puzzle_identifiers": 3}))
    with pytest.raises(ValueError, match=r"Use model\.puzzles=3\.$"):
        refuse_unsuitable_data(compose_run(*arguments))


def test_puzzles_need_a_puzzle_model():
    for settings, words in (
        (("model=trm_tiny",), "data=puzzles, data=sudoku"),
        (("model=gpt_tiny", "data=sudoku"), "data=parquet_stream"),
    ):
        with pytest.raises(ValueError, match=words):
            refuse_unsuitable_data(compose_run(*settings))
    generating = Run.from_config(compose_config("model=trm_tiny", "mode=generate"))
    assert (ProblemCode.unsupported, "mode") in [(problem.code, problem.key) for problem in generating.problems()]
    mlp = Run.from_config(compose_config("model=trm_mlp", "seq=16"))
    assert (ProblemCode.conflict, "seq", 16) in [(p.code, p.key, p.value) for p in mlp.problems()]
