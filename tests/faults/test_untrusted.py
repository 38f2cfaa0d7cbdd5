"""Checkpoints and manifests from elsewhere run no code, take no unbounded memory, and write and remove no file."""

import io
import os
import pickle
import shutil
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_lightning.checkpointing.atomic_io import AtomicCheckpointIO
from esper_lightning.checkpointing.validate import open_checkpoint, relocate_checkpoint_paths
from esper_lightning.growth import load as load_network
from esper_lightning.growth import save as save_network
from esper_lightning.serialization.safe_load import read_tensors
from tests.growth.saved import edit_growth
from tests.runs import Run, fit, load, only_run, tiny_host
from tests.tiers import rest_is_slow

GOOD = {
    "a": torch.arange(1000.0),
    "b": [1, "x", None, (2.5, True)],
    "c": OrderedDict(d=torch.ones(3, dtype=torch.bool)),
}


def archive(path: Path, change: Callable[[str, bytes], bytes] = lambda name, data: data, **options: Any) -> Path:
    """GOOD as a file, with other contents or another form of archive."""
    torch.save(GOOD, whole := io.BytesIO())
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w", **options) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return path


def pickled(path: Path, content: bytes) -> Path:
    """Return a file whose pickle is `content`."""
    return archive(path, lambda name, data: content if name.endswith(".pkl") else data)


def pickle_of_call(callable_: str, argument: bytes) -> bytes:
    """Return a pickle that calls a function with one argument."""
    return b"\x80\x02c" + callable_.encode() + b"\n" + argument + b"\x85R."


HUGE = b"\x8a\x06" + (2**42).to_bytes(6, "little")


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "a.pt")

    assert torch.equal(read_tensors(tmp_path / "a.pt")["a"], GOOD["a"])
    assert torch.equal(read_tensors(archive(tmp_path / "b.pt"))["a"], GOOD["a"])  # source of the cases below


def assert_refused(path: Path, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        read_tensors(path)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    "maker",
    ["builtins bytearray", "torch Tensor", "torch.storage UntypedStorage", "torch FloatTensor", "collections Counter"],
)
def test_what_allocates_as_much_as_a_file_asks_for_is_not_made(maker: str, tmp_path: Path) -> None:
    assert_refused(
        pickled(tmp_path / "a.pt", pickle_of_call(maker.replace(" ", "\n"), HUGE)),
        f"would make a {maker.replace(' ', '.')}",
    )


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize(
    ("protocol", "why"),
    [(2, r"would make a (posix|nt)\.mkdir"), (4, "protocol 4")],  # these name the called function in two ways
)
def test_no_code_is_run(protocol: int, why: str, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"a": Trap()}, tmp_path / "a.pt", pickle_protocol=protocol)

    assert_refused(tmp_path / "a.pt", why)
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    torch.save({}, tmp_path / "a.ckpt")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"a\.ckpt' cannot be read: Permission denied$"):
        read_tensors(tmp_path / "a.ckpt")


def test_torchs_old_format_is_refused(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "a.pt", _use_new_zipfile_serialization=False)

    assert_refused(tmp_path / "a.pt", "does not begin with an archive")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    bomb = archive(
        tmp_path / "a.pt",
        lambda name, data: bytes(10**7) if name.endswith("data/0") else data,
        compression=zipfile.ZIP_DEFLATED,
    )
    assert bomb.stat().st_size < 10**5

    assert_refused(bomb, "compressed")


def test_every_bit_of_a_tensor_is_checked(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "a.pt")
    whole = bytearray((tmp_path / "a.pt").read_bytes())
    whole[whole.index(struct.pack("<f", 500.0))] ^= 1
    (tmp_path / "a.pt").write_bytes(whole)
    assert not torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["a"], GOOD["a"])  # torch does not notice

    assert_refused(tmp_path / "a.pt", "data/0 is damaged")


@pytest.mark.parametrize("added", [b"x", b"PK\5\6" + bytes(18), bytes(100)])
def test_an_archive_that_can_be_read_in_two_ways_is_refused(added: bytes, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt")
    path.write_bytes(path.read_bytes() + added)

    assert_refused(path, "truncated, damaged")


def legacy() -> bytes:
    """Return an object in torch's old format, which torch reads whatever follows."""
    torch.save({"a": 1}, whole := io.BytesIO(), _use_new_zipfile_serialization=False)
    return whole.getvalue()


def two_directories(whole: bytes) -> bytes:
    """Return an archive of torch with a copy of its directory, which zipfile reads; torch reads the first one."""
    records = len(whole) - 98
    directory = int.from_bytes(whole[-6:-2], "little")
    return whole[:records] + whole[directory:records] + whole[records:]


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: legacy() + whole,
        lambda whole: whole[:4] + whole,
        two_directories,
        lambda whole: whole[:-98] + b"PK" + whole[-98:],
        lambda whole: whole[:-10] + bytes(4) + whole[-6:],
    ],
    ids=["old format in front", "bytes in front", "two directories", "bytes between", "another size of the directory"],
)
def test_an_archive_of_another_layout_is_refused(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    torch.save(GOOD, whole := io.BytesIO())
    (tmp_path / "a.pt").write_bytes(change(whole.getvalue()))

    assert_refused(tmp_path / "a.pt", "does not begin with an archive|two directories")


def test_an_archive_without_large_numbers_that_begins_later_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt")
    path.write_bytes(b"PK\3\4" + path.read_bytes())

    assert_refused(path, "two directories, or there is data before it")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/DATA.PKL", "other/data.pkl"])
def test_two_entries_of_one_name_are_refused(name: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(name, pickle.dumps({}, protocol=2))

    assert_refused(path, "a name twice, or more than one folder")


def test_a_tensor_that_is_a_view_of_less_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**12)}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 2000

    assert_refused(tmp_path / "a.pt", "is a view of less")


def test_many_tensors_on_one_memory_are_refused(tmp_path: Path) -> None:
    whole = torch.zeros(10**6)
    torch.save([whole[:] for _ in range(100)], tmp_path / "a.pt")

    assert_refused(tmp_path / "a.pt", "larger than the file")


def test_lists_that_hold_each_other_are_refused(tmp_path: Path) -> None:
    doubled: list[Any] = []
    for _ in range(40):
        doubled = [doubled, doubled]
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    round_: list[Any] = []
    round_.append(round_)
    for content, why in (
        (doubled, "more values, or"),
        (deep, "too deeply"),
        (round_, "too deeply"),
        (2**70, "whole number"),
    ):
        torch.save({"a": content}, tmp_path / "a.pt")
        assert_refused(tmp_path / "a.pt", why)


def test_a_text_that_is_referred_to_many_times_is_counted_each_time(tmp_path: Path) -> None:
    torch.save({"a": ["x" * 10_000] * 5_000}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 25_000

    assert_refused(tmp_path / "a.pt", "longer texts")
    torch.save({"a": ["a name"] * 5_000}, tmp_path / "a.pt")
    assert read_tensors(tmp_path / "a.pt") == {"a": ["a name"] * 5_000}


MODULUS = 2**61 - 1
"""Python's hash of an integer is its remainder by this number."""

MULTIPLES = range(MODULUS, 40_000 * MODULUS, MODULUS)


def pickle_of_mapping(keys: Iterable[Any], empty: bytes = b"}") -> bytes:
    """Return the pickle of a mapping from keys to 0, without the mapping: keys of one hash would take many seconds."""
    return b"\x80\x02" + empty + b"(" + b"".join(pickle_in_pickle(key) + pickle_in_pickle(0) for key in keys) + b"u."


def pickle_in_pickle(value: Any) -> bytes:
    """Return the pickle of a value without its first and last operation."""
    return pickle.dumps(value, protocol=2)[2:-1]


@pytest.mark.parametrize(
    "content",
    [
        pickle_of_mapping(MULTIPLES),
        pickle_of_mapping(-k for k in MULTIPLES),
        pickle_of_mapping(tuple(-1 - (k >> bit) % 2 for bit in range(15)) for k in range(20_000)),  # hash(-1) is -2
        b"\x80\x02c__builtin__\nset\n](" + b"".join(map(pickle_in_pickle, MULTIPLES)) + b"e\x85R.",
        pickle_of_mapping(MULTIPLES, b"ccollections\nOrderedDict\n)R"),
        pickle.dumps({"a": [{"b": {MODULUS: 0}}]}, protocol=2),
        pickle_of_mapping([()]),
    ],
    ids=["integers", "negative", "tuples", "set", "ordered", "nested", "one empty tuple"],
)
def test_keys_that_may_share_a_hash_are_refused_before_they_are_read(content: bytes, tmp_path: Path) -> None:
    pickled(tmp_path / "a.pt", content)
    started = time.process_time()

    assert_refused(tmp_path / "a.pt", "other keys than texts and small numbers|would make a __builtin__.set")
    assert time.process_time() - started < 5.0


def test_a_mapping_that_is_made_from_arguments_is_refused(tmp_path: Path) -> None:
    pairs = b"]" + b"".join(b"K\x01K\x02\x86a" for _ in range(3))  # [(1, 2), (1, 2), (1, 2)]
    assert_refused(
        pickled(tmp_path / "a.pt", b"\x80\x02ccollections\nOrderedDict\n" + pairs + b"\x85R."), "made from arguments"
    )


def test_keys_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    content = {0: {"a": -1}, -2: 1.5, 2.5: True, None: {2**53: MODULUS * 3}, True: OrderedDict(a=[3, "b"])}
    torch.save(content, tmp_path / "a.pt")

    assert read_tensors(tmp_path / "a.pt") == content


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("finished")
    fit(root, "--trainer.max_epochs=1")
    return only_run(root)


def checkpointing(checkpoint: dict[str, Any], monitor: object) -> dict[str, Any]:
    return next(
        s for k, s in checkpoint["callbacks"].items() if k.startswith(f"ModelCheckpoint{{'monitor': {monitor!r}")
    )


@pytest.mark.parametrize(
    "form",
    rest_is_slow(
        ["local://{}", "{}", "{run}/checkpoints/../../victim", "file://{}", "memory://x"],
        {"{run}/checkpoints/../../victim"},
    ),
)
def test_a_checkpoint_cannot_have_files_removed(form: str, finished: Run, tmp_path: Path) -> None:
    """Lightning removes the checkpoint that another one names as its predecessor, even a folder with its contents."""
    run = Run(Path(shutil.copytree(finished.folder, tmp_path / "version_0")))
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "dear.ckpt").write_text("dear")
    named = form.format(victim, run=run.folder)
    checkpoint = load(run.latest)
    for monitor in (None, "rollout/objective"):
        state = checkpointing(checkpoint, monitor)
        state |= {"best_model_path": named, "kth_best_model_path": named, "last_model_path": named}
        state |= {"dirpath": str(run.checkpoints), "best_k_models": {named: torch.tensor(-9.0)}}
    torch.save(checkpoint, run.latest)

    fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", str(run.latest), "--latest.save_last=true")

    assert (victim / "dear.ckpt").read_text() == "dear"
    assert run.latest.is_file()


def test_the_best_is_known_after_a_run_was_moved(finished: Run, tmp_path: Path) -> None:
    state = checkpointing(load(finished.latest), "rollout/objective")
    moved = Path(shutil.copytree(finished.checkpoints, tmp_path / "checkpoints"))

    home = relocate_checkpoint_paths(state, str(moved))

    assert home["best_model_path"] == home["kth_best_model_path"] == str(moved / "best.ckpt")
    assert home["best_k_models"] == {str(moved / "best.ckpt"): state["best_model_score"]}
    assert home["dirpath"] == str(moved)
    (moved / "best.ckpt").unlink()
    assert relocate_checkpoint_paths(state, str(moved)) is None


def test_nothing_but_a_file_is_ever_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dear").write_text("dear")

    AtomicCheckpointIO().remove_checkpoint(f"local://{tmp_path}/folder")
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "folder")

    assert (tmp_path / "folder" / "dear").read_text() == "dear"


def test_links_that_lie_where_a_run_writes_are_not_followed(finished: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(finished.folder, tmp_path / "version_0")))
    dear = tmp_path / "dear"
    dear.write_text("dear")
    for name in ("config.yaml", "run.json", "checkpoints/latest.ckpt", f"checkpoints/.latest.ckpt.{os.getpid()}.tmp"):
        (run.folder / name).unlink(missing_ok=True)
        (run.folder / name).symlink_to(dear if "ckpt" in name else tmp_path / "new")

    fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", str(run.checkpoints / "best.ckpt"))

    assert dear.read_text() == "dear"
    assert not (tmp_path / "new").exists()
    assert not run.latest.is_symlink()


def test_a_damaged_checkpoint_leaves_no_trace(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is found late, when Lightning restores: by then TensorBoard has begun a file."""
    run = Run(Path(shutil.copytree(finished.folder, tmp_path / "version_0")))
    checkpoint = load(run.latest)
    checkpoint["callbacks"]["RolloutState"]["loop"]["state"][0] = torch.zeros(1)  # would be broadcast
    torch.save(checkpoint, run.latest)
    torch.save(checkpoint, tmp_path / "lone.ckpt")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()

    for path in (run.latest, tmp_path / "lone.ckpt"):
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path / "new", "--trainer.max_epochs=2", "--ckpt_path", str(path))
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: checkpoint '{path}' cannot be continued: ")
        assert "[2, 64]" in line

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()


def test_positions_that_numpy_would_believe_are_refused(finished: Run, tmp_path: Path) -> None:
    checkpoint = load(finished.latest)
    checkpoint["callbacks"]["RolloutState"]["random"]["numpy"][2] = 10**6
    torch.save(checkpoint, tmp_path / "a.ckpt")

    with pytest.raises(ValueError, match="position of numpy's generator"):
        open_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("number", [10**400, -1, 1.5, True])
@pytest.mark.parametrize("name", ["ramp_ticks", "age", "ticks_in_stage", "width"])
def test_numbers_that_no_seed_can_have_are_refused(number: Any, name: str, tmp_path: Path) -> None:
    save_network(tiny_host((1, 8, 8), 10), tmp_path / "grown")
    edit_growth(tmp_path / "grown", lambda growth: growth["slots"][0].update({name: number}))

    with pytest.raises(ValueError, match=f"damaged.*{name}"):
        load_network(tiny_host((1, 8, 8), 10), tmp_path / "grown")
