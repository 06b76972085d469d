"""Which files a source means: every one of them once, in one order, and nothing by guessing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import batchwright as bw
from batchwright.sources import list_files, looks_like_paths
from refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """b.txt, a.txt, sub/c.txt, sub/deep/d.txt, and hidden ones beside them."""
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", ".hidden.txt", ".git/e.txt", "sub/.f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(source) -> list[str]:
    return [file.name for file in list_files(source)]


def test_a_folder_means_all_files_below_it_but_hidden_ones(folder):
    assert names(folder) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_a_file_and_a_glob(folder):
    assert names(folder / "b.txt") == ["b.txt"]
    assert names(f"{folder}/*.txt") == ["a.txt", "b.txt"]
    assert names(f"{folder}/**/*.txt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_a_hidden_file_that_is_named_is_meant(folder):
    assert names(folder / ".hidden.txt") == [".hidden.txt"]
    assert names(f"{folder}/.*.txt") == [".hidden.txt"]


def test_a_list_gives_every_file_once_however_it_is_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    files = list_files(["a.txt", "./a.txt", str(folder / "a.txt"), "*.txt", "sub", Path("sub") / ".." / "a.txt"])
    assert [file.path for file in files] == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_files_are_in_the_order_of_their_path_bytes(tmp_path):
    for name in ("b", "a", "B", "é", "a/x", "a-x", "ab"):
        path = tmp_path / (name + ".d" if "/" not in name else name.replace("/", ".d/")) / "f"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    paths = [file.path for file in list_files(tmp_path)]
    assert paths == sorted(paths, key=os.fsencode)
    assert len(paths) == 7


def test_size_and_time_are_kept(folder):
    os.utime(folder / "a.txt", ns=(5, 7))
    (file,) = list_files(folder / "a.txt")
    assert (file.num_bytes, file.modified_ns) == (5, 7)


def test_names_do_not_depend_on_where_the_folder_lies(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("other") / "deeper"
    folder.rename(elsewhere)
    assert names(elsewhere) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_a_name_that_looks_like_a_pattern_can_be_a_file_or_a_folder(tmp_path):
    (tmp_path / "data[1].txt").write_text("")
    (tmp_path / "more[2]").mkdir()
    (tmp_path / "more[2]" / "a.txt").write_text("")
    assert names(tmp_path / "data[1].txt") == ["data[1].txt"]
    assert names(tmp_path / "more[2]") == ["a.txt"]


def test_links_to_files_and_folders_are_followed(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "x.txt").write_text("x")
    (folder / "sub" / "linked").symlink_to(outside)
    (folder / "link.txt").symlink_to(folder / "a.txt")
    assert names(folder) == ["a.txt", "b.txt", "link.txt", "sub/c.txt", "sub/deep/d.txt", "sub/linked/x.txt"]


def test_a_link_back_to_a_folder_above_is_not_followed_for_ever(folder):
    (folder / "sub" / "back").symlink_to(folder)
    assert names(folder) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_a_link_that_leads_nowhere_is_named(folder):
    (folder / "sub" / "gone.txt").symlink_to("nowhere")
    with refused(bw.SourceError, file=folder / "sub" / "gone.txt", reason="No such file or directory"):
        list_files(folder)


def test_a_pipe_in_a_folder_is_left_out(folder):
    os.mkfifo(folder / "pipe.txt")
    assert "pipe.txt" not in names(folder)


def test_a_store_in_a_folder_is_left_out_and_alone_it_is_refused(folder):
    (folder / "my.store").mkdir()
    (folder / "my.store" / "batchwright.json").write_text("{}")
    (folder / "my.store" / "x.txt").write_text("")
    assert names(folder) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]
    with refused(bw.SourceError, file=folder / "my.store", remedy="loader"):
        list_files(folder / "my.store")


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path):
    try:
        with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w"):
            pass
    except OSError:
        pytest.skip("this file system has no such names")
    with refused(bw.SourceError, "caf", "UTF-8", remedy="rename"):
        list_files(tmp_path)


@pytest.mark.parametrize("name", ["nowhere.txt", "*.nothing", "empty", "sub/deep/d.txt/x"])
def test_a_source_without_files_is_named(folder, name):
    (folder / "empty").mkdir()
    with refused(bw.SourceError, file=folder / name, remedy="'data/**/*.jsonl'"):
        list_files(folder / name)


def test_what_of_a_list_is_missing_is_named_even_if_the_rest_is_there(folder):
    with refused(bw.SourceError, file=folder / "nowhere.txt", remedy="'data/**/*.jsonl'"):
        list_files([folder / "a.txt", folder / "nowhere.txt"])


def test_the_home_folder_can_be_written_as_a_tilde(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names("~/sub") == ["c.txt", "deep/d.txt"]


@pytest.mark.parametrize(
    ("parts", "paths"),
    [
        ([Path("a")], True),
        (["a.txt"], True),
        (["DATA/A.TXT"], True),
        (["data/*"], True),
        (["one", "two"], False),
        (["a sentence with a word.txt"], False),
        (["and/or", "a text\nwith lines"], False),
        ([{"text": "a"}], False),
        ([1], False),
        ([], False),
    ],
)
def test_a_list_is_files_only_if_it_could_not_be_texts(parts, paths):
    assert looks_like_paths(parts, [".txt"]) == paths
