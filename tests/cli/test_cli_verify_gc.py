"""`batchwright verify` and `batchwright gc`: is the store whole, and what of it can go."""

from __future__ import annotations

import batchwright as bw


def shard_of(store):
    return next(path for path in sorted(bw.open_store(store).folder.glob("web-train-*.arrow")))


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_whole_store_is_said_to_be_whole(store, succeeds):
    assert "whole" in succeeds(f"verify {store}").out
    done = succeeds(f"verify {store} --json").json
    assert done["ok"]
    assert done["versions"][0]["version"] == bw.open_store(store).version


def test_an_altered_shard_fails_and_is_named(own_store, process):
    damaged = shard_of(own_store)
    flip_a_byte(damaged)
    done = process(f"verify {own_store}")
    assert done.code == 1
    assert str(damaged) in done.out
    assert "1 file" in done.err
    assert "Traceback" not in done.err


def test_damage_as_json(own_store, batchwright):
    damaged = shard_of(own_store)
    damaged.unlink()
    done = batchwright(f"verify {own_store} --json")
    assert done.code == 1
    assert not done.json["ok"]
    assert [part["file"] for part in done.json["versions"][0]["damaged"]] == [str(damaged)]


def test_a_store_without_its_manifest_fails(own_store, batchwright):
    (bw.open_store(own_store).folder / "manifest.json").unlink()
    done = batchwright(f"verify {own_store}")
    assert done.code == 1
    assert "no complete store version" in done.out


def rebaked(path):
    """Two versions: the older one of 1 document, the current one of 2."""
    for texts in (["one"], ["one", "two"]):
        bake_words(path, texts)
    return versions_of(path)


def bake_words(path, texts):
    recipe = bw.DatasetRecipe().add_ingredient(texts, name="words").prepare_step(bw.tokenize("bytes"))
    bw.bake(recipe, to=path, workers=0, show_progress=False)


def versions_of(path):
    current = bw.open_store(path).folder
    (old,) = (folder for folder in current.parent.iterdir() if folder != current)
    return old, current


def test_all_versions_can_be_verified(tmp_path, batchwright):
    old, _ = rebaked(tmp_path / "a.store")
    flip_a_byte(next(old.glob("words-*.arrow")))
    assert batchwright(f"verify {tmp_path / 'a.store'}").code == 0
    assert batchwright(f"verify {tmp_path / 'a.store'} --all").code == 1
    assert batchwright(f"verify {tmp_path / 'a.store'} --version {old.name}").code == 1


def test_gc_removes_old_versions_and_says_so(tmp_path, succeeds):
    old, current = rebaked(tmp_path / "a.store")
    would = succeeds(f"gc {tmp_path / 'a.store'} --dry-run").out
    assert f"would remove  {old}" in would
    assert old.exists()
    assert f"removed  {old}" in succeeds(f"gc {tmp_path / 'a.store'}").out
    assert not old.exists()
    assert current.exists()
    assert succeeds(f"gc {tmp_path / 'a.store'}").out == "nothing to remove\n"


def test_gc_keeps_as_many_as_it_is_told(tmp_path, succeeds):
    old, _ = rebaked(tmp_path / "a.store")
    assert succeeds(f"gc {tmp_path / 'a.store'} --keep 1").out == "nothing to remove\n"
    assert old.exists()


def test_gc_leaves_a_version_that_is_open(tmp_path, succeeds):
    old, _ = rebaked(tmp_path / "a.store")
    reader = bw.open_store(tmp_path / "a.store", version=old.name)
    done = succeeds(f"gc {tmp_path / 'a.store'} --json").json
    assert [(part["folder"], part["in_use"]) for part in done["removals"]] == [(str(old), True)]
    assert done["num_bytes"] == 0
    assert len(reader) == 1
    assert old.exists()


def test_gc_keeps_what_a_plan_needs_until_the_plan_is_forgotten(tmp_path, succeeds):
    folder = tmp_path / "a.store"
    bake_words(folder, ["one"])
    plan = bw.PretrainDataLoader(folder, chunk_size=2, batch_size=1).plan.fingerprint
    bake_words(folder, ["one", "two"])
    old, _ = versions_of(folder)
    for options in (["--dry-run"], []):
        said = succeeds("gc", folder, *options).out
        assert f"kept  {old}" in said
        assert plan in said
    assert succeeds(f"gc {folder} --json").json["removals"][0]["plans"] == [plan]
    assert plan in succeeds(f"plan forget {folder} {plan[:6]}").out
    assert succeeds(f"plan {folder} --json").json["plans"] == []
    assert f"removed  {old}" in succeeds(f"gc {folder}").out


def test_forgetting_names_what_is_missing(store, refuses):
    assert "PLAN" in refuses(f"plan forget {store}")
    assert "0000" in refuses(f"plan forget {store} 0000")


def test_gc_says_that_a_link_is_left(tmp_path, succeeds):
    rebaked(tmp_path / "a.store")
    old, _ = rebaked(tmp_path / "b.store")
    link = tmp_path / "a.store" / "versions" / "linked"
    link.symlink_to(old)
    assert f"a link, left  {link}" in succeeds(f"gc {tmp_path / 'a.store'}").out
    assert bw.open_store(tmp_path / "b.store", version=old.name).num_rows == 1


def test_gc_refuses_a_negative_number(store, refuses):
    assert "keep=" in refuses(f"gc {store} --keep -1")
