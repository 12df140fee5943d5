"""Sources behind URLs: listing, reading, change detection, retries, and masking of secrets."""

from __future__ import annotations

import errno
import io
import json
import random
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data import prepare
from meshwright.data.packing import shards as packing
from meshwright.data.sources import stores
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe
from tests.data.corpus import files as files_of
from tests.data.stores import Server, plain_files, running, s3_application

SECRET = "the-secret-of-the-tests"
TEXTS = [" ".join(random.Random(number).choices(["alpha", "beta", "γάμμα", "\n"], k=400)) for number in range(200)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet_bytes() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": range(200)}), out, row_group_size=30)
    return out.getvalue()


@pytest.fixture(scope="module")
def running_s3() -> Iterator[Server]:
    with running(s3_application()) as server:
        yield server


@pytest.fixture
def s3(running_s3: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 server with an empty bucket "bucket", named in the environment as its users do, without waits."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tests-key-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": running_s3.url,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.001)
    running_s3.refusing = None
    for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        urllib.request.urlopen(urllib.request.Request(f"{running_s3.url}/{path}", method=method)).read()
    running_s3.reads.clear()
    running_s3.ranges.clear()
    running_s3.failing = lambda path, number: None
    yield running_s3


def texts(source: str) -> list[str | None]:
    return [document.text for file in find_files([source]) for document in Reader().read_documents(file)]


def refusal(source: str) -> str:
    with pytest.raises(UserError) as caught:
        texts(source)
    line = str(caught.value)
    assert "\n" not in line and SECRET not in line
    return line


def data_recipe(source: str, cache: Path, **settings: object) -> DataRecipe:
    return DataRecipe(source=source, cache=str(cache), **{"tokenizer": "bytes", "sequence": 32, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "data"), [("a.jsonl", LINES), ("a.parquet", parquet_bytes())], ids=["jsonl", "parquet"]
)
def test_stored_object_reads_like_local_file(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
):
    monkeypatch.setattr(stores, "BLOCK", 10_000)
    s3.put(f"bucket/deep/{name}", data)
    (tmp_path / name).write_bytes(data)
    assert texts(f"s3://bucket/deep/{name}") == texts(str(tmp_path / name)) == TEXTS
    assert len(s3.ranges) > 10 and "all" not in s3.ranges


def test_store_directories_and_globs_name_files_as_on_disk(s3: Server, tmp_path: Path):
    for name in ("b.txt", "a.txt", "deep/er/c.jsonl", "deep/d.parquet", ".hidden", "deep/.git/f.txt"):
        s3.put(f"bucket/corpus/{name}", b"x")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for pattern in ("", "/", "/*.txt", "/**/*.txt", "/deep/*"):
        here = find_files([f"{tmp_path}{pattern}"])
        there = find_files([f"s3://bucket/corpus{pattern}"])
        assert [(file.name, file.format, file.named) for file in there] == [
            (file.name, file.format, file.named) for file in here
        ], pattern
    [file] = find_files(["s3://bucket/corpus/a.txt"])
    assert (file.name, file.named, str(file.path)) == ("a.txt", True, "s3://bucket/corpus/a.txt")


def test_fsspec_stores_are_read(tmp_path: Path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.txt", b"one")
    memory.pipe("/corpus/deep/b.jsonl", b'{"text": "two"}')
    assert texts("memory://corpus") == ["one", "two"]
    assert texts("memory://corpus/**/*.jsonl") == ["two"]
    (tmp_path / "a b.txt").write_text("three")
    assert texts(f"file://{tmp_path}/a%20b.txt") == ["three"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("inner.txt", "four")
        archive.writestr("deep/inner.jsonl", '{"text": "five"}')
    assert texts(f"zip://inner.txt::file://{tmp_path}/a.zip") == ["four"]
    assert texts(f"zip://**/*.jsonl::file://{tmp_path}/a.zip") == ["five"]


@pytest.mark.parametrize("ranges", [True, False])
def test_http_servers_with_and_without_ranges_are_read(monkeypatch: pytest.MonkeyPatch, ranges: bool):
    monkeypatch.setattr(stores, "BLOCK", 20_000)
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.001)
    with running(plain_files({"deep/a.jsonl": LINES, "b.parquet": parquet_bytes()}, ranges)) as server:
        assert texts(f"{server.url}/deep/a.jsonl") == TEXTS
        assert texts(f"{server.url}/b.parquet") == TEXTS
        assert ("all" in server.ranges) != ranges
        assert "there is no such file" in refusal(f"{server.url}/none.jsonl")
        assert "HTTP servers cannot list files; name each one" in refusal(f"{server.url}/*.jsonl")


def test_store_and_disk_prepare_alike_and_are_cached(s3: Server, tmp_path: Path):
    s3.put("bucket/a.jsonl", LINES)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    local = prepare(data_recipe(str(tmp_path / "a.jsonl"), tmp_path / "cache"))
    remote = prepare(data_recipe("s3://bucket/a.jsonl", tmp_path / "cache"))
    assert remote.sha256 == local.sha256
    s3.reads.clear()
    assert prepare(data_recipe("s3://bucket/a.jsonl", tmp_path / "cache")).directory == remote.directory
    assert not s3.reads  # only the version was requested


def test_changed_object_is_prepared_again(s3: Server, tmp_path: Path):
    s3.put("bucket/a.jsonl", LINES)
    before = prepare(data_recipe("s3://bucket/a.jsonl", tmp_path))
    s3.put("bucket/a.jsonl", LINES.replace(b"alpha", b"omega"))  # same size
    after = prepare(data_recipe("s3://bucket/a.jsonl", tmp_path))
    assert after.sha256 != before.sha256
    assert any("omega" in text for text in after.iterate_documents())


def test_object_changed_during_preparation_is_detected(s3: Server, tmp_path: Path):
    s3.put("bucket/a.jsonl", LINES)
    log: list[str] = []

    def change(line: str) -> None:
        log.append(line)
        if line.startswith("packed validation"):
            s3.put("bucket/a.jsonl", LINES.replace(b"alpha", b"omega"))

    with pytest.raises(UserError, match=r"s3://bucket/a.jsonl changed while it was being prepared"):
        prepare(data_recipe("s3://bucket/a.jsonl", tmp_path), log=change)
    assert not list(tmp_path.rglob("manifest.json"))


def test_file_without_version_is_identified_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stores, "_find_version", lambda said: None)
    memory = fsspec.filesystem("memory")
    memory.pipe("/versionless/a.jsonl", LINES)
    before = prepare(data_recipe("memory://versionless/a.jsonl", tmp_path))
    memory.pipe("/versionless/a.jsonl", LINES.replace(b"alpha", b"omega"))
    assert prepare(data_recipe("memory://versionless/a.jsonl", tmp_path)).sha256 != before.sha256


@pytest.mark.parametrize("how", ["half", "503", "500", "429"])
def test_failing_store_requests_are_retried(s3: Server, monkeypatch: pytest.MonkeyPatch, how: str):
    monkeypatch.setattr(stores, "BLOCK", 20_000)
    s3.put("bucket/a.jsonl", LINES)
    s3.failing = lambda path, number: how if number % 3 else None  # two of three
    assert texts("s3://bucket/a.jsonl") == TEXTS


@pytest.mark.parametrize("how", ["half", "503"])
def test_persistent_store_failure_ends_in_one_line_and_resumes(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(stores, "BLOCK", 20_000)
    monkeypatch.setattr(packing, "_BATCH", 10_000)
    s3.put("bucket/a.jsonl", LINES)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    expected = prepare(data_recipe(str(tmp_path / "a.jsonl"), tmp_path / "undisturbed", shard_tokens=30_000))
    blocks = -(-len(LINES) // 20_000)
    recipe = data_recipe("s3://bucket/a.jsonl", tmp_path / "cache", shard_tokens=30_000)
    for broken_from in (blocks // 2, blocks + blocks // 2):  # while cleaning, while packing
        s3.reads.clear()
        s3.failing = lambda path, number, begin=broken_from: how if number > begin else None  # type: ignore[misc]
        with pytest.raises(UserError, match=r"^s3://bucket/a.jsonl cannot be read at byte [\d,]+ of") as caught:
            prepare(recipe)
        line = str(caught.value)
        assert "6 tries failed, the last with: " in line and "run the command again" in line and "\n" not in line
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.name.startswith(".partial")]
        assert not list((tmp_path / "cache").rglob("manifest.json"))
    assert len(list((tmp_path / "cache").rglob("*.tokens.bin"))) > 2  # complete shards are kept
    s3.failing = lambda path, number: None
    assert prepare(recipe).sha256 == expected.sha256
    [there], [here] = (
        [files_of(found.parent / "train") for found in (tmp_path / name).rglob("manifest.json")]
        for name in ("cache", "undisturbed")
    )
    assert there == here


@pytest.mark.parametrize("how", ["503", "403"])
def test_prepared_data_are_used_while_store_is_unreachable(s3: Server, tmp_path: Path, how: str):
    s3.put("bucket/a.jsonl", LINES)
    s3.put("bucket/b.jsonl", LINES.replace(b"alpha", b"omega"))
    recipe = data_recipe("s3://bucket/*.jsonl", tmp_path)
    before = prepare(recipe)
    s3.refusing = how
    log: list[str] = []
    assert prepare(recipe, log=log.append, check=True).sha256 == before.sha256
    assert len(log) == 1 and "using its listing of 20" in log[0] and "cannot be read" in log[0]
    # New files cannot be read, and a store that was never reached has no listing.
    with pytest.raises(UserError, match=r"^s3://bucket/\*.jsonl cannot be read: "):
        prepare(recipe.model_copy(update={"shard_tokens": 12_345}))
    with pytest.raises(UserError, match=r"^s3://bucket/a.jsonl cannot be read: "):
        prepare(data_recipe("s3://bucket/a.jsonl", tmp_path))


def test_deleted_object_is_not_remembered(s3: Server, tmp_path: Path):
    s3.put("bucket/a.jsonl", LINES)
    prepare(data_recipe("s3://bucket/a.jsonl", tmp_path))
    s3.delete("bucket/a.jsonl")
    with pytest.raises(UserError, match="there is no such file"):
        prepare(data_recipe("s3://bucket/a.jsonl", tmp_path))


def test_object_shorter_than_listed_is_refused(s3: Server, monkeypatch: pytest.MonkeyPatch):
    s3.put("bucket/a.jsonl", LINES)
    [file] = find_files(["s3://bucket/a.jsonl"])
    s3.put("bucket/a.jsonl", LINES[: len(LINES) // 2])
    with pytest.raises(UserError, match=rf"{len(LINES) // 2:,} bytes received instead of {len(LINES):,}"):
        list(Reader().read_documents(file))


def test_permanent_store_errors_are_not_retried(s3: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stores, "FIRST_WAIT", 100.0)
    assert refusal("s3://bucket/none.txt").startswith("s3://bucket/none.txt cannot be read: ")
    assert "there is no such file" in refusal("s3://bucket/none.txt")
    assert "NoSuchBucket" in refusal("s3://no-such-bucket/a.txt")
    assert 'data.source: "s3://bucket/*.txt" matches no file' in refusal("s3://bucket/*.txt")
    s3.put("bucket/a.txt", b"text")
    s3.failing = lambda path, number: "403"
    line = refusal("s3://bucket/a.txt")
    assert "credentials come from the environment: AWS_ACCESS_KEY_ID" in line


def test_missing_credentials_error_names_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stores, "FIRST_WAIT", 100.0)

    def ask() -> None:
        raise OSError("Error performing PUT http://169.254.169.254/latest/api/token: connection timed out")

    with pytest.raises(UserError, match="credentials come from the environment: AWS_ACCESS_KEY_ID"):
        stores.retry("s3://bucket/a", ask)


def test_secret_in_store_answer_is_masked(s3: Server, monkeypatch: pytest.MonkeyPatch):
    def ask() -> None:
        raise PermissionError(f"signature of {SECRET} by tests-key-id does not match\nand more")

    with pytest.raises(UserError) as caught:
        stores.retry("s3://bucket/a", ask)
    assert "signature of *** by *** does not match and more" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:word@bucket/a.txt",
        "https://user:word@example.org/a.txt",
        "https://example.org/a.txt?X-Amz-Signature=word",
        "https://example.org/a.txt?a=b&sig=word",
        "https://example.org/a.txt?token=word",
    ],
)
def test_url_with_credentials_is_refused_without_printing_them(url: str):
    line = refusal(url)
    assert "has credentials, which do not belong in a recipe; put them into the environment" in line
    assert "word" not in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense://a/b.txt", 'data.source: "nonsense://a/b.txt": Protocol not known: nonsense'),
        ("sftp://host/a.txt", 'data.source: "sftp://host/a.txt": sftp may log in with your keys at a host'),
        ("memory://nothing/there.txt", "there is no such file"),
    ],
)
def test_unreachable_url_is_one_line_error(url: str, said: str):
    assert said in refusal(url)


def test_full_local_disk_is_not_blamed_on_store(monkeypatch: pytest.MonkeyPatch):
    tries = []

    def ask() -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"memory://a: no space for it in .* \(No space left on device\); .* TMPDIR"):
        stores.retry("memory://a", ask)
    assert len(tries) == 1
