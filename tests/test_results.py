"""results/ and the documents that quote it: every number comes out of the records."""

from __future__ import annotations

import dataclasses
import importlib
import json
import lzma
import re
import shutil
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import patchproof as pp

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RUN = Path("imagenette") / "greedy-seed0" / "certify-3percent-3x3"


def script(name: str):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def rebuild():
    return script("rebuild")


def stored(folder: Path, name: str = "records") -> bytes:
    return lzma.decompress((folder / f"{name}.jsonl.xz").read_bytes())


def records(folder: Path, name: str = "records") -> list[dict]:
    return [json.loads(line) for line in stored(folder, name).splitlines()]


def indices(folder: Path) -> tuple[bytes, ...]:
    return tuple(re.findall(rb'^{"index": (\d+)', stored(folder), flags=re.MULTILINE))


@cache
def shares(folder: Path) -> dict[str, float]:
    """The percentages, counted without the program."""
    found = records(folder)
    return {name: 100 * sum(one[name] is True for one in found) / len(found) for name in found[0]}


def share(folder: Path, name: str) -> float:
    return shares(folder)[name]


def read(*folders: Path) -> list:
    return [sys.modules["evidence_records"].result(folder, RESULTS) for folder in folders]


@pytest.mark.slow
def test_tables_and_documents_hold_what_the_records_say():
    """In a process of its own, without the types of all 457,164 records checked."""
    words = [sys.executable, str(ROOT / "scripts" / "rebuild.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "everything holds what the records say\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "experiment"),
    [("headline", "imagenette"), pytest.param("imagenette-one-epoch", "imagenette-one-epoch", marks=pytest.mark.slow)],
)
def test_certified_with_both_mask_sets_is_what_a_plain_count_gives(name, experiment):
    table = (RESULTS / "tables" / f"{name}.md").read_text("utf-8")
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    for run in {path.parent.name.partition("-seed")[0] for path in RESULTS.glob(f"{experiment}/*/train")}:
        folders = sorted(RESULTS.glob(f"{experiment}/{run}-seed*/certify-3percent-3x3"))
        means = [statistics.mean(share(f, key) for f in folders) for key in ("undefended", "defended", "certified")]
        fine = [share(folder, "certified") for folder in RESULTS.glob(f"{experiment}/{run}-seed*/certify-3percent-6x6")]
        seeds = f"{len(folders)}" if len(fine) == len(folders) else f"{len(folders)} (6×6: {len(fine)})"
        assert f"| {seeds} |" in rows[run]
        assert "| {:.1f} | {:.1f} | {:.1f}".format(*means) in rows[run]
        assert rows[run].rstrip(" |").split("|")[-1].strip().startswith(f"{statistics.mean(fine):.1f}" if fine else "–")


@pytest.mark.slow
def test_every_curve_shows_all_its_points(rebuild):
    runs = [path for s in ("cutout", "greedy") for path in RESULTS.glob(f"imagenette/{s}-seed0/certify-3percent-*")]
    _, pictures = rebuild.build(read(*runs), [], [])
    assert {picture.key for picture in pictures} == {path.stem for path in (RESULTS / "figures").iterdir()}
    for picture in pictures:
        (axes,) = picture.figure.axes
        for line, strategy in zip(*axes.get_legend_handles_labels(), strict=True):
            drawn = getattr(line, "lines", [line])[0].get_xydata()
            for across, value in drawn:
                named = [label.get_text() for label in axes.get_xticklabels()]  # of the places 0, 1, …
                masks = f"{across:.0f}" if picture.key == "imagenette-cost" else named[round(across)]
                folder = RESULTS / f"imagenette/{strategy}-seed0/certify-3percent-{masks}x{masks}"
                passes = statistics.mean(record["forwards"] for record in records(folder))
                counted = passes if picture.key == "imagenette-cost" else share(folder, "certified")
                assert value == pytest.approx(counted)
                for place, (low, high) in ((across, axes.get_xlim()), (value, axes.get_ylim())):
                    assert low <= place <= high
            assert len(drawn) == sum(strategy in run.parts[-2] for run in runs)


CAMPAIGN = {
    "manifest": {
        "config": {"patch": "3%", "masks": 3, "places": 4, "restarts": 2, "steps": 40, "seed": 0, "precision": "bf16"},
        "device": "a machine",
    },
    "double masking": {
        "seen": 4, "tried": 2, "broken": 0, "passes": 90, "seconds": 60.0, "indices": [7, 1], "breaks": [],
    },
    "literal rule": {
        "seen": 1, "tried": 1, "broken": 1, "passes": 9, "seconds": 3.0, "indices": [7], "breaks": [{"index": 7}],
    },
}  # fmt: skip


def test_a_campaign_is_counted_from_the_images_it_lists(rebuild, tmp_path):
    path = tmp_path / "campaign" / "greedy-seed0.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CAMPAIGN))
    tables, _ = rebuild.build([], [], rebuild.read_campaigns(tmp_path))
    assert tables[0].rows == (
        ("greedy-seed0", "3%, 3×3 masks", "double masking", 4, 2, 0, "45", 1.0),
        ("greedy-seed0", "3%, 3×3 masks", "literal rule", 1, 1, 1, "9", 0.05),
    )
    for wrong in ({"tried": 3}, {"broken": 1}, {"indices": [7, 7]}):
        path.write_text(json.dumps(CAMPAIGN | {"double masking": CAMPAIGN["double masking"] | wrong}))
        with pytest.raises(SystemExit, match="contradict the images listed"):
            rebuild.read_campaigns(tmp_path)


def test_differences_are_counted_on_the_images_both_looked_at(rebuild):
    runs = (RESULTS / "imagenette" / f"{s}-seed0" / "certify-3percent-3x3" for s in ("greedy", "cutout"))
    greedy, cutout = read(*runs)
    some = frozenset(list(cutout.images)[:100])
    found = rebuild.paired(greedy, dataclasses.replace(cutout, images=some, proven=cutout.proven & some))
    differences = [(i in greedy.proven) - (i in cutout.proven) for i in some]
    assert (found.images, found.only, found.lost) == (100, differences.count(1), differences.count(-1))
    assert found.points == pytest.approx(100 * statistics.mean(differences))
    assert found.half_width == pytest.approx(196 * statistics.pstdev(differences) / 10)
    folder = RESULTS / "cifar10" / "greedy-seed0"
    usual, native = read(folder / "certify-35px-3x3", folder / "native/certify-5px-3x3")
    name = f"{usual.experiment}/{usual.strategy}-native/35px~5px/3"
    only = len(usual.proven - native.proven) - len(native.proven - usual.proven)
    assert rebuild.native_values([usual, native])[name] == f"{100 * only / len(usual.images):.1f}"
    fewer = dataclasses.replace(native, images=frozenset(list(native.images)[1:]))
    assert name not in rebuild.native_values([usual, fewer])


def test_all_that_was_certified_and_attacked_of_a_network_is_of_the_same_weights():
    """On several days, for several patches; and no two networks of an experiment have the same, but on the leaderboard,
    where a network may have several defences."""
    seen: dict[tuple[str, str], set[str]] = {}
    for path in RESULTS.rglob("manifest.json"):
        made = json.loads(path.read_text("utf-8"))
        if made["command"] != "train":
            experiment, run = path.relative_to(RESULTS).parts[:2]
            seen.setdefault((experiment, run), set()).add(made["identity"]["weights_sha256"])
    for path in (RESULTS / "campaign").glob("*.json"):
        made = json.loads(path.read_text("utf-8"))["manifest"]
        experiment, _, strategy = path.stem.rpartition("-")
        seen[experiment, f"{strategy}-seed0"].add(made["identity"]["weights_sha256"])
    for path in RESULTS.rglob("train/results.json"):
        made = json.loads(path.read_text("utf-8"))
        if "weights_sha256" in made:
            experiment, run = path.relative_to(RESULTS).parts[:2]
            seen.setdefault((experiment, run), set()).add(made["weights_sha256"])
    assert [name for name, weights in seen.items() if len(weights) != 1] == []
    for experiment in {experiment for experiment, _ in seen} - {"leaderboard"}:
        own = [weights for (one, _), weights in seen.items() if one == experiment]
        assert len(set.union(*own)) == len(own), experiment


def test_seeds_are_as_far_apart_as_a_plain_count_says(rebuild):
    folders = list(RESULTS.glob("imagenette-one-epoch/greedy-seed?/certify-3percent-3x3"))
    shares, runs = [share(folder, "certified") for folder in folders], read(*folders)
    name = "imagenette-one-epoch/greedy-spread/3%/3"
    assert rebuild.values(runs)[name] == f"{max(shares) - min(shares):.1f}"
    assert name not in rebuild.values(runs[:1])


def test_one_epoch_is_the_first_of_ten():
    """Step by step, to the last bit; but for the run that an older version of the program made."""
    short, long = (RESULTS / name for name in ("imagenette-one-epoch", "imagenette"))
    both = [run.name for run in short.iterdir() if (long / run.name).exists()]
    assert len(both) == 13
    for run in set(both) - {"greedy-seed0"}:
        lines = [records(folder / run / "train", "log") for folder in (short, long)]
        one, ten = ([line["loss"] for line in found if line["kind"] == "step"] for found in lines)
        assert len(ten) == 10 * len(one)
        assert ten[: len(one)] == one, run


@pytest.mark.parametrize("experiment", ["imagenette", "imagenette-one-epoch", "cifar10"])
def test_part_of_the_images_is_the_same_part_and_large_enough(experiment):
    """Under ±2 points, as planned; after one epoch fewer are certified than was thought, which the page says."""
    widest = 2.2 if experiment == "imagenette-one-epoch" else 2.0
    parts: dict[int, set[tuple[int, ...]]] = {}
    for path in (RESULTS / experiment).rglob("records.jsonl.xz"):
        results = json.loads((path.parent / "results.json").read_text("utf-8"))
        if path.parent.name.startswith("certify") and results["images"]["done"] < results["images"]["available"]:
            parts.setdefault(results["images"]["done"], set()).add(found := indices(path.parent))
            assert len(found) == results["images"]["done"]
            low, high = results["certified"]["interval"]
            assert 50 * (high - low) < widest, path
    assert {size: len(lists) for size, lists in parts.items()} == dict.fromkeys(parts, 1)


def test_the_gap_is_greedy_above_cutout():
    table = (RESULTS / "tables" / "imagenette-gap.csv").read_text("utf-8").splitlines()
    rows = {tuple(line.split(",")[:2]): line.split(",")[2:4] for line in table[1:]}
    assert len(rows) == 6
    for (masks, patch), (images, ours) in rows.items():
        name = f"certify-{patch.replace('%', 'percent')}-{masks.replace('×', 'x')}"
        greedy, cutout = (records(RESULTS / "imagenette" / f"{s}-seed0" / name) for s in ("greedy", "cutout"))
        assert [r["index"] for r in greedy] == [r["index"] for r in cutout]
        differences = [one["certified"] - other["certified"] for one, other in zip(greedy, cutout, strict=True)]
        assert (images, ours.split()[0]) == (str(len(differences)), f"{100 * statistics.mean(differences):.1f}")


def test_the_numbers_under_attack_are_what_a_plain_count_gives(rebuild):
    numbers = rebuild.attack_values(rebuild.read_attacks(RESULTS), rebuild.read_campaigns(RESULTS))
    folder = RESULTS / "imagenette" / "greedy-seed0" / "attack-3percent-3x3"
    for name in ("undefended_attacked", "attacked", "certified"):
        assert numbers[f"attack/imagenette/greedy/3%/3/{name}"].startswith(f"{share(folder, name):.0f}% (")
    campaigns = [json.loads(path.read_text("utf-8"))["double masking"] for path in RESULTS.glob("campaign/*.json")]
    assert numbers["campaign/tried"] == str(sum(len(set(one["indices"])) for one in campaigns))
    assert numbers["campaign/broken"] == str(sum(len(one["breaks"]) for one in campaigns)) == "0"
    for folder in set(RESULTS.glob("*/*/attack-*")) - set(RESULTS.glob("leaderboard/*/attack-*")):
        for record in records(folder):
            assert record["certified"] <= record["attacked"] <= record["defended"]
            assert record["undefended_attacked"] <= record["undefended"]


def test_the_audit_of_tau_is_what_a_plain_count_gives(rebuild):
    every = [path.parent for path in RESULTS.rglob("results.json") if path.parent.name != "train"]
    other = ("leaderboard", "imagenette-stronger", "fashion-memory", "cifar10-memory")  # τ measured otherwise
    folders = [path for path in every if path.parents[1].name not in other]
    taus, audits = [], []
    for folder in folders:
        manifest, results = (json.loads((folder / f"{name}.json").read_text()) for name in ("manifest", "results"))
        taus.append(manifest["tau"])
        audits += [(results["audit"], manifest["tau"]["drift"]["precision"])] if "audit" in results else []
    found = rebuild.audit_values(RESULTS)
    assert found == {
        "audit/runs": str(len(folders)),
        "audit/redone": f"{sum(audit['redone'] for audit, _ in audits):,}",
        "audit/ratio": f"{max(audit['largest_change'] / measured for audit, measured in audits if measured):.2f}",
        "audit/floor": str(sum(tau["fp32"] == 64 * 2**-23 * tau["drift"]["scale"] for tau in taus)),
    }
    page = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / "decisions" / "0003-tau.md").read_text("utf-8"))
    assert f"{found['audit/redone']} labels were decided again" in page
    assert f"{found['audit/ratio']} times the measured one" in page
    assert f"{found['audit/floor']} of {found['audit/runs']} stored runs" in page


def test_a_folder_without_results_is_no_run_and_a_record_changed_by_hand_is_found_out(rebuild, tmp_path):
    shutil.copytree(RESULTS / RUN, tmp_path / RUN)
    assert len(rebuild.read(tmp_path)) == 1
    found = records(RESULTS / RUN)
    lost = next(r for r in found if not r["certified"])
    lost["certified"], lost["witness"] = True, None
    text = "".join(json.dumps(r) + "\n" for r in found)
    (tmp_path / RUN / "records.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    with pytest.raises(SystemExit, match="contradicts the records"):
        rebuild.read(tmp_path)
    (tmp_path / RUN / "results.json").unlink()
    assert rebuild.read(tmp_path) == []


def test_every_table_says_hardware_time_passes_and_seeds():
    for path in (RESULTS / "tables").glob("*.md"):
        text = path.read_text("utf-8")
        for word in ("Hardware: ", "passes", "Seed"):
            assert word in text, (path.name, word)
        assert re.search(r"\bminutes\b|\d s\b", text), path.name


# --- documents -----------------------------------------------------------------------------------------------------

NUMBER = r"(?:\d+(?:[.,]\d+)*|one|two|three|four|five|ten|fifteen|twenty)"
TYPED = re.compile(rf"{NUMBER}\s?(?:%|points?\b|times\b)")
SETTINGS = {"1%", "2%", "3%", "95%"}
"""Patches and intervals: asked for, not measured."""
PAGES = ["README.md", "docs/reproducing.md", "docs/attacks.md", "docs/howto/masks.md", "results/README.md"]


def test_a_number_changed_by_hand_is_put_right_and_an_unknown_one_refused(rebuild):
    page = (ROOT / "docs/reproducing.md").read_text("utf-8")
    tables = {path.stem: path.read_text("utf-8") for path in (RESULTS / "tables").glob("*.md")}
    marked = re.findall(r"<!-- = (\S+) -->(.*?)<!-- \. -->", page)
    changed = re.sub(r"(\d)\.\d ±", r"\1.x ±", page, count=1).replace(f"-->{marked[0][1]}<!--", "-->99.9<!--")
    assert changed != page
    assert rebuild.filled(changed, tables, dict(marked)) == page
    with pytest.raises(SystemExit, match="no table `nope`"):
        rebuild.filled("<!-- results: nope -->\n<!-- end -->", {"yes": ""}, {})
    with pytest.raises(SystemExit, match="no number `nope`"):
        rebuild.filled("<!-- = nope -->1<!-- . -->", {}, {"yes": "1"})


@pytest.mark.parametrize("name", PAGES)
def test_no_measured_number_is_typed_by_hand(name):
    page = (ROOT / name).read_text("utf-8")
    text = re.sub(r"<!-- results: .*?<!-- end -->|<!-- = .*?<!-- \. -->|```.*?```", "", page, flags=re.S)
    assert set(TYPED.findall(text)) <= SETTINGS
    assert name != "README.md" or re.findall(r"\d+\.\d+ ?%", text) == []
    assert not re.search(r"^[ *-]*<!-- =", page, flags=re.M)  # Markdown would take the rest of the line for HTML


def test_nothing_in_results_names_the_machine_it_was_made_on():
    for path in RESULTS.rglob("*.json"):
        assert not re.search(r"\"/|/root|/home|/tmp", path.read_text("utf-8")), path


@pytest.mark.slow
def test_the_leaderboard_is_current():
    subprocess.run([sys.executable, str(ROOT / "scripts" / "leaderboard.py"), "--check"], check=True)


def test_a_run_from_python_becomes_a_row_and_two_patches_are_not_taken_for_one(tmp_path, monkeypatch, capsys):
    leaderboard, folder = script("leaderboard"), tmp_path / "mine"
    monkeypatch.setattr(leaderboard, "ROOT", tmp_path)
    monkeypatch.setattr(leaderboard, "FOLDER", tmp_path)
    monkeypatch.setattr(leaderboard, "ALSO", {})
    data = [(torch.full((1, 9, 9), i / 4), i % 2) for i in range(4)]
    for patches in (1, 2):
        threat = pp.PatchThreat((9, 9), ((2, 3),), patches)
        defense = pp.defense("alarm", lambda images: images.flatten(1)[:, :2], threat)
        pp.certify(defense, data, folder=folder / f"certify-{patches}")
    for row, words in (["--row", str(tmp_path)], "no manifest.json"), ([], "mine has no note.txt"):
        monkeypatch.setattr(sys, "argv", ["leaderboard.py", *row])
        with pytest.raises(SystemExit) as left:
            leaderboard.main()
        assert left.value.code == 2
        assert words in capsys.readouterr().err
    (folder / "note.txt").write_text("two pixels\n")
    one, two = (row for row in leaderboard.rows() if row["measured"])
    assert (one["patch"], two["patch"]) == ("2×3", "two of 2×3")
    assert (one["network"], one["certified"]["n"], one["data"]) == ("two pixels", 4, "images")


def test_the_leaderboard_is_what_a_plain_count_of_the_records_gives():
    rows = json.loads((RESULTS / "leaderboard" / "leaderboard.json").read_text("utf-8"))["rows"]
    measured = [row for row in rows if row["measured"]]
    for row in measured:
        lines = stored(ROOT / row["source"]).splitlines()
        found = [re.findall(rb'"certified": (true|false)', line) for line in lines]  # 60 MB of JSON take seconds
        assert all(len(verdicts) == 1 for verdicts in found)
        assert row["certified"]["k"] == found.count([b"true"])
        assert row["clean"]["n"] == len(lines)
    assert {row["defense"] for row in rows} >= {"patchcleanser", "bagcert", "ibp", "smoothed-vit"}
    assert all(row["source"] for row in rows)
