"""What a report concludes: paired comparisons against slow references, verdicts, next steps, and what is excluded."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from patchproof.report import Options, build_report
from patchproof.report._conclude import Conclusion, about_run, about_runs, conclude, difference
from patchproof.report._counts import (
    Paired,
    TracedRun,
    attacked_rates,
    compare,
    count_pairs,
    holm,
    mask_shares,
    witness,
)
from patchproof.runs._reading import read_run
from patchproof.runs._record import Record
from patchproof.types import InputError
from run_folders import attacked_records, detection, manifest, random_records, write_run, write_training

# Paired statistics


def test_mcnemars_p_is_the_sum_of_both_tails():
    for lost, gained in product(range(12), repeat=2):
        n, least = lost + gained, min(lost, gained)
        tail = sum(math.comb(n, k) for k in range(least + 1)) / 2**n
        assert Paired(5, lost, gained, 7).p == pytest.approx(min(1.0, 2 * tail))


def test_the_paired_interval_holds_the_difference_as_often_as_it_says():
    """Over every outcome of 14 images; and it is narrower than for unpaired images where the runs agree."""
    n = 14
    cuts = combinations(range(n + 3), 3)
    tables = [(a, b - a - 1, c - b - 1, n + 2 - c) for a, b, c in cuts]
    ends = {counts: Paired(*counts).interval for counts in tables}
    for shares in ((0.6, 0.05, 0.15, 0.2), (0.25, 0.25, 0.25, 0.25), (0.1, 0.0, 0.3, 0.6)):
        coverage = width = 0.0
        for counts, (low, high) in ends.items():
            ways = math.factorial(n) // math.prod(map(math.factorial, counts))
            chance = ways * math.prod(share**count for share, count in zip(shares, counts, strict=True))
            coverage += chance * (low <= shares[2] - shares[1] <= high)
            width += chance * (high - low)
        assert 0.93 <= coverage <= 0.995
        first, second = shares[0] + shares[1], shares[0] + shares[2]
        apart = 2 * 1.96 * math.sqrt((first * (1 - first) + second * (1 - second)) / n)
        assert width < (apart if shares[0] * shares[3] > shares[1] * shares[2] else 1.1 * apart)


def test_swapping_the_runs_turns_the_difference_round():
    one, other = Paired(30, 4, 11, 15), Paired(30, 11, 4, 15)
    assert (one.difference, one.p) == (-other.difference, other.p)
    assert one.interval == pytest.approx([-end for end in reversed(other.interval)])
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_so_many_images_show_the_difference_four_times_in_five():
    seen = Paired(50, 8, 14, 28)
    needed = seen.images_needed
    draws = np.random.default_rng(0).multinomial(needed, [0.5, 0.08, 0.14, 0.28], size=2000)
    found = np.mean([Paired(*map(int, counts)).p < 0.05 for counts in draws])
    assert 0.74 < found < 0.86
    assert Paired(5, 3, 3, 5).images_needed is None


# Comparisons


def lines_of(folder: Path) -> dict[int, dict]:
    return {line["index"]: line for line in map(json.loads, (folder / "records.jsonl").read_text().splitlines())}


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """A baseline, one clearly better, one that differs by chance, each on the same 300 images."""
    records = random_records(300)
    better = [replace(r, certified=bool(r.defended) and (bool(r.certified) or r.index % 2 == 0)) for r in records]
    chance = [replace(r, certified=bool(r.defended) and (bool(r.certified) or r.index % 60 == 0)) for r in records]
    named = {"plain": records, "better": better, "chance": chance}
    return [write_run(tmp_path / name, manifest(count=300), found) for name, found in named.items()]


def test_two_runs_are_compared_image_by_image_in_table_figure_and_json(runs, tmp_path):
    report = build_report(runs[:2])
    assert (report.title, report.subtitle) == ("2 certifications side by side", "")
    report.write(tmp_path / "out")
    rows = json.loads((tmp_path / "out/tables/paired.json").read_text())["rows"]
    first, second = map(lines_of, runs[:2])
    for row in rows:
        pairs = [(first[i][row["accuracy"]], second[i][row["accuracy"]]) for i in first]
        assert (row["gained"], row["lost"]) == (pairs.count((False, True)), pairs.count((True, False)))
        assert row["difference in points"]["difference"] == (row["gained"] - row["lost"]) / 300
        assert row["McNemar p"] == count_pairs(pairs).p
    assert [row["accuracy"] for row in rows] == ["certified", "defended", "undefended"]
    classes = list(csv.DictReader(io.StringIO((tmp_path / "out/tables/paired-classes.csv").read_text())))
    for row in classes:
        mine = [i for i in first if ("cat", "dog", "eel")[first[i]["label"]] == row["class"]]
        gained = sum(second[i]["certified"] and not first[i]["certified"] for i in mine)
        assert (int(row["images"]), int(row["difference in points gained"])) == (len(mine), gained)
    assert sorted(row["class"] for row in classes) == ["cat", "dog", "eel"]
    assert (tmp_path / "out/figures/paired.svg").is_file()
    said = json.loads((tmp_path / "out/report.json").read_text())
    assert said["verdict"][0] == "Best against the baseline plain: better."
    assert "Certified: better is" in said["verdict"][1]
    assert "points above plain (95% interval +" in said["verdict"][1]
    assert "Go on with better." in said["next_steps"]
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert page.index("Verdict") < page.index("Next steps") < page.index("What the guarantee excludes")


def test_many_runs_are_compared_with_the_baseline_that_is_chosen(runs, tmp_path):
    report = build_report(runs, Options(baseline=runs[1]))
    (table,) = (table for table in report.tables if table.key == "paired")
    assert table.title == "Against better"
    assert {row[0] for row in table.rows} == {"plain", "chance"}
    assert all(row[-1] >= row[-2] for row in table.rows)  # Holm's p is never the smaller
    assert "paired" in {picture.key for picture in report.pictures}
    assert report.conclusion.verdict[0] == "No run certifies clearly more images than the baseline better."
    unclear = build_report([runs[0], runs[2]]).conclusion
    assert any("no clear difference between chance and plain" in text for text in unclear.verdict)
    needed = "images would be needed to show the difference from plain (chance 80%); the data set has 300."
    assert any(text.startswith("chance: about ") and text.endswith(needed) for text in unclear.next_steps)
    few = build_report([*runs, write_run(tmp_path / "few", manifest(count=300), random_records(14))])
    pages, files = (
        {row[1] for table in tables if table.key == "paired-classes" for row in table.rows}
        for tables in ([table for section in few.sections for table in section.tables], few.tables)
    )
    assert (pages, files) == ({"better", "chance"}, {"better", "chance", "few"}), "14 images of 3 classes are too few"
    with pytest.raises(InputError, match=r"baseline must be the folder or name of .* plain or better, not other"):
        build_report(runs[:2], Options(baseline=Path("other")))


def test_runs_of_one_name_are_labelled_with_their_folders_on_one_line_which_also_name_the_baseline(runs, tmp_path):
    for path in runs:
        (tmp_path / f"of-{path.name}").mkdir()
    inside = [path.rename(tmp_path / f"of-{path.name}" / "c") for path in runs]
    report = build_report(inside, Options(baseline=Path("of-better/c")))
    assert report.conclusion.verdict[0].endswith("the baseline of-better/c.")
    (paired,) = (picture for picture in report.pictures if picture.key == "paired")
    ticks = [tick.get_text() for tick in paired.figure.axes[0].get_yticklabels()]
    assert ticks == ["of-plain/c", "of-chance/c"]


def test_a_clear_difference_on_clean_images_is_said_beside_the_certificates(runs, tmp_path):
    worse = [replace(r, defended=bool(r.certified)) for r in random_records(300)]
    poor = write_run(tmp_path / "poor", manifest(count=300), worse)
    for several, corrected in (([poor, runs[0]], False), ([poor, runs[0], runs[2]], True)):
        said = [
            text for text in build_report(several).conclusion.verdict if text.startswith("Defended, on clean images")
        ]
        assert any("plain is" in text for text in said)
        assert all(("(Holm)" in text) == corrected for text in said)


def test_what_a_compared_run_has_tried_is_not_recommended(runs, tmp_path):
    worse = [replace(r, defended=bool(r.certified)) for r in random_records(300)]
    poor = write_run(tmp_path / "poor", manifest(count=300), worse)
    first, second = (read_run(folder) for folder in (poor, runs[0]))
    traced = [TracedRun(first, "poor", "greedy"), TracedRun(second, "plain", "cutout")]
    steps = conclude(about_runs(traced, traced[0], compare(first, second), {})).next_steps
    assert any(text.startswith("Train longer") for text in steps)
    assert not any("instead of cutout" in text for text in steps)
    for weights, tried in (("aa", True), ("bb", False)):
        finer = manifest(count=300, per_axis=6, **{"identity.weights_sha256": weights})
        six = write_run(tmp_path / weights, finer, worse)
        assert any(text.startswith("Try 6×6") for text in build_report([runs[0], six]).conclusion.next_steps) != tried


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"identity.data_sha256": "ee"}, "it is about other images than plain"),
        (detection(), "its certificates are detection"),
        ({"patch": 2}, "its certificates are about 2×2 px (0.5%), those of plain about 5×5 px (3.2%)"),
        ({"side": 64, "patch": 12}, "its certificates are about 12×12 px (3.5%), those of plain"),
        ({"identity.defense.patches": 2}, "its certificates are about two patches of 5×5 px (3.2%), those of plain"),
        ({"config.threat_space": "native"}, "its certificates are about 5×5 px (3.2%), footprint of 5px native, those"),
    ],
)
def test_runs_that_cannot_be_paired_are_not_and_the_reason_is_said(runs, tmp_path, changes, words):
    """Another patch is another claim; the same share of a larger input is the same one."""
    best = [replace(r, defended=True, certified=True) for r in random_records(300)]
    other = write_run(tmp_path / "other", manifest(count=300, **changes), best)
    report = build_report([runs[0], other])
    assert "paired" not in {table.key for table in report.tables}
    assert any(text.startswith(f"other is not compared: {words}") for text in report.conclusion.verdict)
    assert report.notices[0]["run"] == "other"
    assert report.notices[0]["text"].startswith(f"mixed: {words}")
    assert not any(text.startswith(("Best", "Go on", "Keep")) for text in report.conclusion.verdict)
    assert not any(text.startswith(("Go on", "Keep")) for text in report.conclusion.next_steps)
    assert any("against the same patch" in text for text in report.conclusion.next_steps) == ("detection" not in words)
    large = write_run(tmp_path / "large", manifest(count=300, side=56, patch=10), best)
    assert build_report([runs[0], large]).conclusion.next_steps[0] == "Go on with large."
    half = write_run(tmp_path / "half", manifest(count=300), random_records(150))
    (table,) = (table for table in build_report([runs[0], half]).tables if table.key == "paired")
    assert {row[2] for row in table.rows} == {150}


# Verdicts


def failing(count: int) -> list[Record]:
    """Images of which every eel fails, under mask 5, and is taken for a cat; all others are certified."""
    records = []
    for index in range(count):
        label, holds = index % 3, index % 3 != 2
        witness = {"witness": {"masks": [4, index % 9], "label": label if holds else 0}}
        margin = 1.0 if holds else -1.0
        records.append(Record(index, f"x/{index}.png", label, True, True, holds, margin, 45, witness))
    return records


def concluded(folder: Path, records: list[Record], strategy: str | None = None, **changes) -> Conclusion:
    run = read_run(write_run(folder, manifest(count=len(records), **changes), records))
    return conclude(about_run(TracedRun(run, run.name, strategy)), [run])


def test_a_verdict_names_what_fails_and_what_to_do(tmp_path):
    found = concluded(tmp_path / "r", failing(90), "cutout", available=5000)
    said = "\n".join(found.verdict)
    assert "66.7% (55.9–76.3%) of 90 images are certified: the right label under any patch of 5×5 px (3.2%)." in said
    assert "n = 90 is small: the 95% interval spans 20.3 points." in said
    assert "30 images have no certificate; the classifier alone gets 0 of them wrong." in said
    assert "Clearly below the average of 66.7%: eel 0.0%." in said
    assert "mask 5 (row 2 of 3, column 2 of 3) 100.0%" in said
    steps = "\n".join(found.next_steps)
    assert "images for an interval of ±5 points (the data set has 5,000)." in steps
    assert "Try 6×6 masks: each hides 8×8 pixels instead of 12×12, for " in steps
    assert "Train with the masking strategy greedy instead of cutout" in steps
    assert "Look at the images of eel in the explorer; they fail most often under mask 5 (row 2 of 3" in steps
    (table,) = (t for t in build_report([tmp_path / "r"]).tables if t.key == "failures")
    assert table.rows[0][:3] == ("eel", 30, 0)
    assert table.rows[0][3].startswith("5 (30×)")
    assert table.rows[0][4] == "cat (30×)"


@pytest.mark.parametrize("rate", [0.0, *(n / 20 for n in range(1, 20)), 1.0])
def test_so_many_images_as_advised_are_enough_if_the_rate_stays_nearly_the_same(tmp_path, rate):
    """The printed span, too, must exceed the 10 points that a small run is said to miss."""

    def said(k: int, n: int) -> tuple[list[str], list[int]]:
        records = [replace(r, defended=True, certified=r.index < k) for r in random_records(n)]
        found = concluded(tmp_path / str(len(list(tmp_path.iterdir()))), records, available=5000)
        advised = [re.match(r"Certify about (\d+) images for an interval", text) for text in found.next_steps]
        return [text for text in found.verdict if "is small" in text], [int(m[1]) for m in advised if m]

    for n in (40, 130):
        small, advised = said(round(rate * n), n)
        assert len(small) == len(advised)
        for many in advised:
            assert float(re.search(r"spans (.*) points", small[0])[1]) > 10
            toward = rate + (0.005 if rate < 0.5 else -0.005)
            for k in {round(rate * many), round(toward * many)}:
                assert said(k, many) == ([], [])


def test_a_span_just_beyond_the_limit_does_not_read_as_the_limit(tmp_path):
    for n in range(360, 400):
        found = concluded(tmp_path / str(n), [replace(r, certified=r.index < 0.63 * n) for r in random_records(n)])
        for text in found.verdict:
            assert "spans 10 points" not in text
            assert "spans 10.0 points" not in text


@pytest.mark.parametrize(
    ("paired", "corrected", "ends"),
    [
        (Paired(60, 17, 7, 36), None, "no clear difference between a and b"),
        (Paired(60, 30, 7, 23), None, "a is"),
        (Paired(60, 30, 7, 23), 0.06, "no clear difference between a and b"),
        (Paired(60, 12, 10, 38), None, "no clear difference between a and b"),
        (Paired(60, 12, 10, 38), 0.04, "a is"),
    ],
)
def test_a_difference_says_that_the_test_decides_where_the_interval_disagrees(paired, corrected, ends):
    said, (low, high) = difference(paired, "a", "b", corrected), paired.interval
    assert said.startswith(ends)
    disagree = (low > 0 or high < 0) != said.startswith("a is")
    why = f" Interval and test disagree, at the limit of what {paired.n} images show; the "
    assert said.endswith(f"{why}{'' if corrected is None else 'corrected '}test decides.") == disagree
    assert ("disagree" in said) == disagree


def test_advice_that_does_not_apply_is_not_given(tmp_path):
    strong = concluded(tmp_path / "strong", failing(3000), "greedy", per_axis=6)
    assert not [text for text in (*strong.verdict, *strong.next_steps) if "is small" in text or "Try " in text]
    assert any(text.startswith("Train longer") for text in strong.next_steps)
    wrong = [replace(r, undefended=r.certified, defended=r.certified) for r in failing(300)]
    steps = concluded(tmp_path / "wrong", wrong, "greedy").next_steps
    assert any("alone it gets 100 of 100 images without a certificate wrong" in text for text in steps)
    taught = concluded(tmp_path / "taught", failing(300), "memory").next_steps
    assert "Train longer, with more images or a larger network: masks of memory are used already." in taught
    (one,) = build_report([write_run(tmp_path / "one", manifest(count=1), failing(1))]).conclusion.verdict[:1]
    assert "of 1 image is certified: " in one
    few = "Collect and certify about 373 images for an interval of ±5 points (the data set has 60)."
    assert few in concluded(tmp_path / "few", failing(60)).next_steps
    unfinished = build_report([write_run(tmp_path / "half", manifest(count=90), failing(40))]).conclusion
    assert unfinished.next_steps[0] == "Resume half: 50 of 90 images are left."


def test_an_attack_ends_in_both_bounds_and_a_broken_certificate_in_a_warning(tmp_path):
    records = attacked_records(60)
    content = manifest(count=60, command="attack")
    assert "a: robust accuracy is from 35.0% (certified) to " in "".join(
        build_report([write_run(tmp_path / "a", content, records)]).conclusion.verdict
    )
    victim = next(i for i, record in enumerate(records) if record.certified)
    fallen = replace(records[victim].attack, attacked=False, place=(0, 0, 5, 5), attacked_label=0)
    records[victim] = replace(records[victim], attack=fallen)
    report = build_report([write_run(tmp_path / "b", content, records)])
    assert report.conclusion.verdict[0] == "Do not rely on this defence: 1 certificate was broken by a patch."


def test_an_attack_is_no_rival_of_what_it_attacks_and_has_its_own_verdict(runs, tmp_path):
    attack = write_run(tmp_path / "attack", manifest(count=300, command="attack"), attacked_records(300))
    report = build_report([attack, runs[0]])
    assert report.title == "1 certification and 1 attack side by side"
    assert "paired" not in {table.key for table in report.tables}
    said, steps = "\n".join(report.conclusion.verdict), "\n".join(report.conclusion.next_steps)
    low, high = (attacked_rates(read_run(attack))[name].rate for name in ("certified", "attacked"))
    words = f"from {low:.1%} (certified) to {high:.1%} (attacked), n = 300; 0 certificates were broken by a patch."
    assert said.count(f"attack: robust accuracy is {words}") == 1
    assert "of 300 images are certified" in said
    assert "Keep" not in steps
    assert "Attack the defence" not in steps
    with pytest.raises(InputError, match="baseline must be the folder or name of a certification, plain, not"):
        build_report([attack, runs[0]], Options(baseline=attack))
    again = write_run(tmp_path / "b", manifest(count=300, command="attack"), attacked_records(300))
    assert "".join(build_report([attack, again]).conclusion.verdict).count("obust accuracy is from") == 2
    both = build_report([attack, again])
    assert both.conclusion.verdict[0].startswith("attack: ")
    assert all(text.startswith(("attack: ", "b: ")) for text in both.conclusion.verdict)
    assert all(text.startswith(("attack: ", "Attack harder")) for text in both.conclusion.next_steps)
    assert "of b: more steps" in both.conclusion.next_steps[-1]
    with pytest.raises(InputError, match="name of a certification, of which there is none, not"):
        build_report([attack, again], Options(baseline=attack))
    empty = write_run(tmp_path / "empty", manifest(count=300, command="attack"), [])
    begun = build_report([empty, runs[0]])
    assert begun.title == "1 certification and 1 attack side by side"
    assert begun.conclusion.verdict[0].startswith("plain: ")
    other = manifest(count=300, **{"identity.weights_sha256": "bb"})
    rival = build_report([write_run(tmp_path / "other", other, random_records(300, seed=1)), runs[0], attack])
    (table,) = (table for table in rival.tables if table.key == "paired")
    assert {row[0] for row in table.rows} == {"plain"}


def test_a_baseline_without_records_is_not_mixed_with_itself(runs, tmp_path):
    none = write_run(tmp_path / "none", manifest(count=300), [])
    report = build_report([none, runs[0]])
    assert [notice["run"] for notice in report.notices if notice["text"].startswith("mixed")] == ["plain"]


def test_a_network_that_answers_one_class_is_told_to_learn_first(tmp_path):
    one = [replace(r, undefended=r.label == 0, defended=r.label == 0, certified=r.label == 0) for r in failing(24)]
    found = concluded(tmp_path / "one", one)
    assert found.verdict[0].startswith("The network answers one class nearly always, cat: it is right on 8 of 8 images")
    assert [step.split(" until")[0] for step in found.next_steps] == ["Train the classifier"]
    several = build_report([write_run(tmp_path / "a", manifest(count=24), failing(24)), tmp_path / "one"])
    assert several.conclusion.verdict[0].startswith("one: the network answers one class nearly always")
    assert [notice["run"] for notice in several.notices if "answers one class" in notice["text"]] == ["one"]
    none = write_run(tmp_path / "none", manifest(count=24), [replace(r, certified=False) for r in failing(24)])
    chosen = build_report([none, tmp_path / "one"]).conclusion
    assert "No run that tells the classes apart certifies clearly more images than the baseline none." in chosen.verdict
    assert "Keep none: no other certifies clearly more." in chosen.next_steps
    assert not any(text.startswith("Train the classifier") for text in chosen.next_steps)
    remarks = {"remarks": ["random network: its weights were drawn at random"]}
    drawn = write_run(tmp_path / "drawn", manifest(count=24, **remarks), failing(24))
    assert not any("drawn" in step for step in build_report([drawn, none]).conclusion.next_steps)
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    several = build_report([tmp_path / "a", tmp_path / "one", tmp_path / "same"]).conclusion.verdict
    assert [text.split(" answers")[0] for text in several if "one class" in text] == ["one, same: the network"]
    for conclusion in (chosen, build_report([tmp_path / "one", none]).conclusion):
        assert not any("with one" in text or "Keep one" in text for text in conclusion.next_steps)
    for name, records in {"mixed": failing(24), "few": one[:9]}.items():
        assert "one class" not in "".join(concluded(tmp_path / name, records).verdict)


def test_a_defence_that_needs_another_kind_of_network_says_so(tmp_path):
    poor = [replace(r, certified=False, defended=r.index % 10 == 0) for r in failing(60)]
    changes = {"identity.defense.name": "derandomized-smoothing"}
    for name, records, said in (("poor", poor, True), ("good", failing(60), False)):
        content = manifest(count=60, **changes)
        del content["masks"]
        run = read_run(write_run(tmp_path / name, content, records))
        steps = conclude(about_run(TracedRun(run, run.name)), [run]).next_steps
        assert any("the recipe cifar10-32px-derandomized-smoothing" in text for text in steps) == said
        assert not any(text.startswith(("Train with", "Look at")) for text in steps), "masks are not its matter"


def test_of_a_native_patch_the_guarantee_names_what_was_asked_for_not_its_footprint(tmp_path):
    content = manifest(count=9, **{"config.threat_space": "native", "config.patch": "2px"})
    run = read_run(write_run(tmp_path / "n", content, failing(9)))
    first = conclude(about_run(TracedRun(run, run.name)), [run]).excluded[0]
    assert first.startswith(
        "Patches of any shape that do not fit into 2×2 pixels (on the original image, before resizing)"
    )


def test_trainings_end_in_a_verdict_too(tmp_path):
    found = build_report([write_training(tmp_path / "t")]).conclusion
    assert "epoch 2 of 2 is the best, 40.0% certified" in found.verdict[0]
    assert found.next_steps[0] == "Train t for more epochs: the last one is the best."


def test_two_patches_are_said_counted_by_rectangle_and_recommended_masks_that_can_be_paid(tmp_path):
    evidence = {"witness": {"masks": [9, 44], "label": 2}}  # rectangles 0 and 1, 7 and 8
    records = [replace(r, certified=False, margin=-1.0, evidence=evidence) for r in random_records(30, masks=45)]
    folder = write_run(tmp_path / "a", manifest(count=30, **{"identity.defense.patches": 2}), records)
    run = read_run(folder)
    assert (run.patches, run.axes, run.masks_words) == (2, (3, 3), "45 unions of 3×3 masks")
    assert list(mask_shares(run, run.good)) == [0, 1, 7, 8]
    assert witness(run, run.good[0]) == ((0, 1, 7, 8), 2)
    report = build_report([folder])
    page = report.html()
    assert "against two patches of 5×5 px (3.2%) anywhere on the image" in page
    found = conclude(about_run(TracedRun(run, run.name)), [run])
    assert found.excluded[0].endswith("and three patches at once.")
    (more,) = [step for step in found.next_steps if "Try" in step]
    assert "Try 4×4 masks" in more
    assert "2,516 different masked copies per image instead of 255" in more
    proved = replace(records[0], certified=True, defended=True)
    certified = conclude(about_run(TracedRun(replace(run, records=(proved,)), run.name)))
    assert "certified: the right label under any two patches of 5×5 px (3.2%)." in certified.verdict[0]


def test_what_the_guarantee_excludes_depends_on_the_threat(tmp_path):
    assert concluded(tmp_path / "a", failing(9)).excluded[0] == (
        "Patches of any shape that do not fit into 5×5 pixels (at the network's input, after resizing), and two "
        "patches at once."
    )
    native = concluded(tmp_path / "b", failing(9), **{"config.threat_space": "native"}).excluded
    assert "on the original image, before resizing" in native[0]
    assert not [text for text in native if "alarms" in text]
    assert [text for text in concluded(tmp_path / "c", failing(9), **detection()).excluded if "alarms" in text]


# Looks


def test_nothing_green_no_zero_speed_and_no_curve_of_single_images(tmp_path):
    names = [f"k{i}" for i in range(90)]
    records = [replace(r, certified=False, label=r.index) for r in random_records(90, classes=90)]
    folder = write_run(tmp_path / "r", manifest(count=90, classes=names), records, seconds=3600)
    report = build_report([folder])
    page = report.html()
    assert 'class="tile certified"' in page
    assert 'class="tile defended some"' in page
    cost = next(table for table in report.tables if table.key == "cost")
    assert dict(cost.rows)["time per image"] == "40.0 s"
    assert "images per second" not in dict(cost.rows)
    assert not {"classes", "failures"} & {section.key for section in report.sections}


def test_a_run_says_the_split_date_commit_and_weights_it_was_made_with(tmp_path):
    changes = {"date": "2026-01-02T03:04:05+00:00", "commit": "c0ffee", "identity.weights_sha256": "abc123"}
    folder = write_run(tmp_path / "r", manifest(count=9, **changes), failing(9))
    (table,) = (table for table in build_report([folder]).tables if table.key == "settings")
    found = dict(table.rows)
    assert (found["split"], found["date"], found["commit"]) == ("all", changes["date"], "c0ffee")
    assert (found["sha256 of the weights"], found["images"]) == ("abc123", "9 of 9")
    old = write_run(tmp_path / "old", manifest(count=9), failing(9))
    (table,) = (table for table in build_report([old]).tables if table.key == "settings")
    assert dict(table.rows)["date"] is None
