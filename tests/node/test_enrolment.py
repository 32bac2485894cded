"""Where a node's key and certificate lie."""

from __future__ import annotations

from pathlib import Path

from node.enrolment import Enrolment, identity_folder


def test_a_node_without_a_folder_of_its_own_leaves_no_key_behind() -> None:
    with identity_folder(None) as folder:
        enrolment = Enrolment(folder, "p1", [])
        enrolment.request()
        (folder / "node-key.pem").write_text("secret")
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_what_lies_in_an_operators_folder_stays(tmp_path: Path) -> None:
    with identity_folder(tmp_path) as folder:
        (folder / "node-key.pem").write_text("kept")
    assert (tmp_path / "node-key.pem").read_text() == "kept"
