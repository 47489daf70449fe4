"""What a folder lists: its order decides the order of documents."""

from __future__ import annotations

from pathlib import Path

from meshfeed.files import Folder


def test_a_local_folder_lists_its_files_by_name(tmp_path: Path) -> None:
    in_order = ["B.txt", "a.txt", "a/x.txt", "a/y/z.txt", "b.txt", "b10.txt", "b2.txt"]
    for size in (5, 1, 6, 0, 3, 2, 4):
        path = tmp_path / "corpus" / in_order[size]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    listed = [(name, size) for size, name in enumerate(in_order)]
    assert Folder(str(tmp_path / "corpus")).names() == listed
    assert Folder(f"file://{tmp_path}/corpus").names() == listed


def test_links_are_listed_and_those_to_folders_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "c").write_bytes(b"123")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, target in (("folder", "far"), ("file", "far/c"), ("broken", "gone")):
        (corpus / name).symlink_to(tmp_path / target)
    assert Folder(str(corpus)).names() == [("broken", 0), ("file", 3), ("folder/", 0)]
