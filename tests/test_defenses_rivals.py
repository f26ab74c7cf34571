"""Votes of views and local evidence: each rule against its definition, and against an adversary that controls every
view or cell that the patch touches."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import patchproof as pp
from patchproof.geometry import Fields, Windows, receptive_windows
from patchproof.types import CheckError, InputError, TauExceededError
from reference import all_patches, argmax, measured

CLASSES = 3
SIZE = (1, 9)
THREAT = pp.PatchThreat(SIZE, ((1, 2),))
IMAGE = torch.zeros(1, 1, *SIZE)
THRESHOLD = 0.4
VOTES = [set(chosen) for count in range(3) for chosen in combinations(range(CLASSES), count)]
"""The votes that a view can cast if a vote takes a probability of 0.4."""
STEP = 1 / 4096
"""Patch pixels have the value (number + 1) · STEP, which selects the adversary's logits; clean pixels are 0."""


class Scripted:
    """Scripted logits for each view or cell i: `clean[i]` without a patch, else `attacks[number][i]`."""

    fill = (0.0,)
    num_classes = CLASSES
    receptive_field = (2, 1, -1)

    def __init__(self, clean: Tensor, attacks: Tensor):
        self.clean, self.attacks = clean, attacks

    def __call__(self, images: Tensor) -> Tensor:
        return self.clean.mean(dim=0).expand(len(images), -1)

    def masked(self, images: Tensor, keep: Tensor) -> Tensor:
        """A view of two columns is known by its left one; the last wraps around."""
        shown = keep[:, 0, 0]
        view = (shown & ~shown.roll(1, dims=1)).long().argmax(dim=1)
        return self.answers(images.amax(dim=(1, 2, 3)), view)

    def local_logits(self, images: Tensor) -> Tensor:
        """Cell i sees the columns i − 1 and i."""
        padded = torch.nn.functional.pad(images[:, 0, 0], (1, 1))
        seen = torch.maximum(padded[:, :-1], padded[:, 1:])
        cells = torch.arange(seen.shape[1]).expand_as(seen)
        return self.answers(seen.flatten(), cells.flatten()).unflatten(0, seen.shape).transpose(1, 2)[:, :, None]

    def answers(self, pixel: Tensor, place: Tensor) -> Tensor:
        number = (pixel / STEP).round().long() - 1
        attacked = self.attacks[number.clamp(min=0) % len(self.attacks), place]
        return torch.where((number >= 0)[:, None], attacked, self.clean[place])


def windows_of(touches: Any, count: int) -> list[set[int]]:
    """A(p) for every place of the patch, from which views or cells see one of its columns."""
    return [{i for i in range(count) if touches(i, patch)} for patch in all_patches(SIZE, THREAT.largest)]


def patched(assignments: int) -> Tensor:
    """Every place of the patch with every number the adversary can write there."""
    images = torch.zeros(len(all_patches(SIZE, THREAT.largest)), assignments, 1, *SIZE)
    for row, patch in zip(images, all_patches(SIZE, THREAT.largest), strict=True):
        row[:, 0, :, patch.left : patch.right] = (torch.arange(assignments)[:, None, None] + 1) * STEP
    return images.flatten(0, 1)


def vote_logits(votes: set[int]) -> list[float]:
    """Probabilities of 1 or ½ for the votes; of ⅓, which is none, for no vote."""
    return [0.0 if c in votes or not votes else -40.0 for c in range(CLASSES)]


def view_cases(seed: int) -> tuple[list[set[int]], Tensor, list[set[int]]]:
    """Votes of each view that lean to one class, what the adversary may answer instead, and A(p)."""
    generator = torch.Generator().manual_seed(seed)
    lean = int(torch.randint(CLASSES, (), generator=generator))
    own = torch.rand(SIZE[1], generator=generator) < 0.7
    drawn = torch.randint(len(VOTES), (SIZE[1],), generator=generator).tolist()
    votes = [{lean} if leaning else VOTES[i] for leaning, i in zip(own.tolist(), drawn, strict=True)]
    touches = windows_of(lambda i, p: {i, (i + 1) % SIZE[1]} & set(range(p.left, p.right)), SIZE[1])
    return votes, clean_and_attacks(4, lambda answers, i: vote_logits(VOTES[answers[i % 3]])), touches


def clean_and_attacks(choices: int, logits: Any) -> Tensor:
    """Every assignment of a choice to three neighbouring places, which is as many as a patch touches."""
    every = list(product(range(choices), repeat=3))
    return torch.tensor([[logits(answers, i) for i in range(SIZE[1] + 1)] for answers in every])


def count_rule(votes: list[set[int]], y: int, touches: list[set[int]]) -> bool:
    n = [sum(c in v for v in votes) for c in range(CLASSES)]
    delta = max(map(len, touches))
    return all(n[y] >= n[c] + 2 * delta + (c < y) for c in range(CLASSES) if c != y)


def exact_rule(votes: list[set[int]], y: int, touches: list[set[int]]) -> bool:
    n = [sum(c in v for v in votes) for c in range(CLASSES)]
    return all(
        n[y] - sum(y in votes[i] for i in touched) >= n[c] + sum(c not in votes[i] for i in touched) + (c < y)
        for touched in touches
        for c in range(CLASSES)
        if c != y
    )


def masked_scores(evidence: list[list[float]], touches: list[set[int]]) -> list[float]:
    """PatchGuard: each class without its most evident window."""
    return [sum(e[c] for e in evidence) - max(sum(evidence[i][c] for i in w) for w in touches) for c in range(CLASSES)]


def masked_rule(evidence: list[list[float]], y: int, touches: list[set[int]]) -> bool:
    cells = set(range(len(evidence)))
    return all(
        sum(evidence[i][y] for i in cells - a) - max(sum(evidence[i][y] for i in w - a) for w in touches)
        > sum(evidence[i][c] for i in cells - a)
        for a in touches
        for c in range(CLASSES)
        if c != y
    )


def bounded_rule(evidence: list[list[float]], y: int, touches: list[set[int]], least: float) -> bool:
    """Clipped BagNet (−1) and BagCert (0)."""
    cells = set(range(len(evidence)))
    return all(
        sum(evidence[i][y] for i in cells - a) + least * len(a) > sum(evidence[i][c] for i in cells - a) + len(a)
        for a in touches
        for c in range(CLASSES)
        if c != y
    )


SMOOTHING: dict[str, dict[str, Any]] = {
    "derandomized-smoothing": {"certificate": "count", "threshold": THRESHOLD},
    "exact": {"certificate": "exact", "threshold": THRESHOLD},
    "patchguard-smoothing": {"threshold": THRESHOLD},
    "smoothed-vit": {"stride": 1},
}


def smoothing(name: str, classifier: Any, threat: pp.PatchThreat = THREAT, **options: Any) -> Any:
    known = name if name != "exact" else "derandomized-smoothing"
    engine = measured(batch_size=512)
    return pp.defense(known, classifier, threat, engine=engine, band=2, **SMOOTHING[name] | options)


TOUCHED_BY = Fields.touched_by


def one_too_small(fields: Fields, threat: pp.PatchThreat, **options: bool) -> Windows:
    """As if each patch touched one view or cell less than it does."""
    windows = TOUCHED_BY(fields, threat, **options)
    touched = windows.touched
    return Windows(touched & (touched.cumsum(dim=1) < touched.sum(dim=1, keepdim=True)), windows.places)


def check_against_adversary(build: Any, attacks: Tensor, answer: int, verdict: Any, monkeypatch) -> tuple[int, int]:
    """Compare predictions and certificates with the reference, and attack every certified answer in every way.

    Returns how many certificates there are, and whether one falls to an attack if A(p) is one cell too small.
    """
    defense, certified, fallen = build(), 0, 0
    assert int(defense.predict(IMAGE)) == answer
    for y in range(CLASSES):
        found = defense.certify(IMAGE, torch.tensor([y]))
        verdict(found, y)
        if bool(found.certified):
            certified += 1
            assert set(defense.predict(patched(len(attacks))).tolist()) == {y}
    with monkeypatch.context() as patch:
        patch.setattr(Fields, "touched_by", one_too_small)
        receptive_windows.cache_clear()
        broken = build()
        if bool(broken.certify(IMAGE, torch.tensor([answer])).certified):
            fallen = int(set(broken.predict(patched(len(attacks))).tolist()) != {answer})
    receptive_windows.cache_clear()
    return certified, fallen


@pytest.mark.parametrize("name", SMOOTHING)
def test_votes_equal_the_definition_and_no_adversary_moves_a_certified_answer(name, monkeypatch):
    results = []
    for seed in range(12):
        votes, attacks, touches = view_cases(seed)
        if name == "smoothed-vit":  # one vote per view, for the smallest of the largest
            votes = [{min(v, default=0)} for v in votes]
        classifier = Scripted(torch.tensor([vote_logits(v) for v in votes]), attacks)
        n = [sum(c in v for v in votes) for c in range(CLASSES)]
        evidence = [[float(c in v) for c in range(CLASSES)] for v in votes]
        answer = argmax(masked_scores(evidence, touches) if name == "patchguard-smoothing" else n)

        def verdict(found: pp.Certificates, y: int, votes=votes, evidence=evidence, touches=touches) -> None:
            count, exact = count_rule(votes, y, touches), exact_rule(votes, y, touches)
            assert exact or not count
            rules = {"exact": exact, "patchguard-smoothing": masked_rule(evidence, y, touches)}
            if name == "smoothed-vit":  # a tie between logits is no sure vote
                assert not bool(found.certified) or count
                return
            assert bool(found.certified) == rules.get(name, count)
            if name != "patchguard-smoothing":
                assert (bool(found.evidence["votes.count"]), bool(found.evidence["votes.exact"])) == (count, exact)

        build = partial(smoothing, name, classifier)
        results.append(check_against_adversary(build, attacks, answer, verdict, monkeypatch))
    certified, fallen = map(sum, zip(*results, strict=True))
    assert certified > 1
    assert fallen


@pytest.mark.parametrize(
    ("name", "options", "votes"),
    [
        ("exact", {}, [{0}, {0}, {1}, {0}, {0}, {1}, {0}, {0}]),
        ("smoothed-vit", {"certificate": "exact"}, [{0}, {0}, {1}, {0}, {0}, {1}, {0}, {0}]),
        ("patchguard-smoothing", {}, [set(), {0}, set(), set(), {0}, set(), set(), {0}]),
    ],
)
def test_a_certificate_falls_without_the_views_that_wrap_around(name, options, votes, monkeypatch):
    """Only the patch at the left edge can win, and only if it takes the last view, too."""

    def unwrapped(fields: Fields, threat: pp.PatchThreat, **options: bool) -> Windows:
        windows, wraps = TOUCHED_BY(fields, threat, **options), fields.columns[:, 0] & fields.columns[:, -1]
        return Windows(windows.touched & ~((windows.places[:, 1:2] == 0) & wraps), windows.places)

    _, attacks, _ = view_cases(0)
    classifier = Scripted(torch.tensor([vote_logits(v) for v in votes]), attacks)
    image, label, threat = IMAGE[..., :8], torch.tensor([0]), pp.PatchThreat((1, 8), ((1, 2),))
    assert not bool(smoothing(name, classifier, threat, **options).certify(image, label).certified)
    monkeypatch.setattr(Fields, "touched_by", unwrapped)
    defense = smoothing(name, classifier, threat, **options)
    assert bool(defense.certify(image, label).certified)
    assert set(defense.predict(patched(len(attacks))[..., :8]).tolist()) != {0}


@pytest.mark.parametrize("name", ["clipped-bagnet", "patchguard-bagnet", "bagcert", "sigmoid"])
def test_local_rules_equal_the_definition_and_no_adversary_moves_a_certified_answer(name, monkeypatch):
    """A patch may also make logits infinite, or NaN."""
    extremes = [(-400.0,) * 3, (torch.nan,) * 3, (400.0, -400.0, -400.0), (-400.0, torch.inf, -torch.inf)]
    extremes += [(-400.0, 400.0, -400.0), (-400.0, -400.0, 400.0)]
    attacks = clean_and_attacks(len(extremes), lambda answers, i: extremes[answers[i % 3]])
    cells, results = SIZE[1] + 1, []
    touches = windows_of(lambda i, p: {i - 1, i} & set(range(p.left, p.right)), cells)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        lean = torch.nn.functional.one_hot(torch.randint(CLASSES, (1,), generator=generator), CLASSES)
        leaning = 4 * (torch.rand(cells, generator=generator) < 0.9)
        clean = torch.randint(-8, 8, (cells, CLASSES), generator=generator) / 4 + 0.125 + lean * leaning[:, None]
        clean = 20 * clean if name == "clipped-bagnet" else clean - float(name in ("bagcert", "sigmoid"))
        local: dict[str, Any] = {
            "clipped-bagnet": (lambda value: torch.tanh(0.05 * value - 1), partial(bounded_rule, least=-1)),
            "patchguard-bagnet": (torch.relu, masked_rule),
            "bagcert": (lambda value: (value > 0).double(), partial(bounded_rule, least=0)),
            "sigmoid": (torch.sigmoid, partial(bounded_rule, least=0)),
        }
        evidence_of, rule = local[name]
        evidence = evidence_of(clean.double()).tolist()
        plain = [sum(e[c] for e in evidence) for c in range(CLASSES)]
        answer = argmax(masked_scores(evidence, touches) if name == "patchguard-bagnet" else plain)

        def verdict(found: pp.Certificates, y: int, evidence=evidence, rule=rule) -> None:
            assert bool(found.certified) == rule(evidence, y, touches)

        known, options = ("bagcert", {"score": name}) if name == "sigmoid" else (name, {})
        build = partial(pp.defense, known, Scripted(clean, attacks), THREAT, **options)
        results.append(check_against_adversary(build, attacks, answer, verdict, monkeypatch))
    certified, fallen = map(sum, zip(*results, strict=True))
    assert certified > 1
    assert fallen


class Darkest:
    """Cells and views of two columns that answer 1 if their darkest pixel is bright, else 0."""

    fill, num_classes, receptive_field = (0.0,), 2, (2, 1, 0)

    def __call__(self, images: Tensor) -> Tensor:
        return self.masked(images, torch.ones_like(images[:, :1], dtype=torch.bool))

    def masked(self, images: Tensor, keep: Tensor) -> Tensor:
        darkest = images.where(keep, 1.0).amin(dim=(1, 2, 3)) - 0.5
        return 400 * torch.stack([-darkest, darkest], dim=1)

    def local_logits(self, images: Tensor) -> Tensor:
        darkest = -torch.nn.functional.max_pool2d(-images, 2, 1) - 0.5
        return 400 * torch.cat([-darkest, darkest], dim=1)


@pytest.mark.parametrize(
    ("name", "dark", "options"),
    [
        ("bagcert", (2, 5), {}),
        ("clipped-bagnet", (2, 5), {}),
        ("patchguard-bagnet", (1, 6), {}),
        ("derandomized-smoothing", (1, 0), {"certificate": "exact"}),
        ("smoothed-vit", (1, 0), {"stride": 1, "certificate": "exact"}),
        ("patchguard-smoothing", (1, 0), {}),
    ],
)
def test_the_attack_breaks_certificates_whose_windows_are_one_cell_too_small(name, dark, options, monkeypatch):
    """A dark patch of 2×2 takes up to 9 of 56 cells, or 3 of 9 views, from the bright class, and the dark one wins.

    Dark already are the last columns, and pixels at the left of the first row. Logits are large, as in trained BagNets.
    """
    bright, (columns, pixels) = torch.full((1, 8, 9), 0.75), dark
    close = bright.clone()
    close[:, :, 9 - columns :], close[:, 0, :pixels] = 0, 0
    data = [(bright, 1), (close, 1)]
    if "smooth" in name:
        options = {"band": 2, "engine": measured(), **options}
    plan = pp.AttackPlan(target="defended", steps=2, step_size=1.0, restarts=1, place_search="exhaustive")

    def attacked() -> tuple[int, int]:
        receptive_windows.cache_clear()
        found = pp.attack(pp.defense(name, Darkest(), pp.PatchThreat((8, 9), ((2, 2),)), **options), data, plan)
        return found.certified.k, len(found.broken)

    assert attacked() == (1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Fields, "touched_by", one_too_small)
        assert attacked() == (2, 1)
    receptive_windows.cache_clear()


class Local:
    """Local logits by cell; of cells that see a white pixel, 1e7 times these."""

    fill, receptive_field = (0.0,), (2, 1, 0)

    def __init__(self, logits: Tensor):
        self.logits = logits

    def __call__(self, images: Tensor) -> Tensor:
        return self.local_logits(images).mean(dim=(2, 3))

    def local_logits(self, images: Tensor) -> Tensor:
        loud = torch.maximum(images[..., :-1], images[..., 1:]) == 1
        return torch.where(loud, 1e7, 1.0) * self.logits.T[None, :, None]


def test_robust_masking_considers_border_patches_that_touch_fewer_cells():
    """Σ_{∉A(p)} e_c is larger for the smaller A(p) there: such a patch may fail where the next one does not."""
    touches = windows_of(lambda i, p: {i, i + 1} & set(range(p.left, p.right)), 8)
    assert {len(a) for a in touches} == {2, 3}
    found, expected, without = [], [], []
    for seed in range(20, 40):
        logits = torch.rand(8, CLASSES, generator=torch.Generator().manual_seed(seed)).double()
        logits = torch.cat([1.5 * logits[:, :1] ** 0.5, logits[:, 1:] ** 4], dim=1)
        defense = pp.defense("patchguard-bagnet", Local(logits), THREAT)
        found.append(bool(defense.certify(IMAGE, torch.tensor([0])).certified))
        expected.append(masked_rule(logits.tolist(), 0, touches))
        without.append(masked_rule(logits.tolist(), 0, [a for a in touches if len(a) == 3]))
    assert found == expected
    assert expected != without
    assert any(expected)


def test_a_local_certificate_does_not_depend_on_the_other_images_of_the_batch():
    defense = pp.defense("bagcert", Local(torch.tensor([[1.0, -1.0, -1.0]] * 8)), THREAT)
    images = torch.zeros(2, 1, *SIZE)
    images[1, 0, 0, 0] = 1
    assert bool(defense.certify(images, torch.tensor([0, 0])).certified[0])


@pytest.mark.parametrize("name", ["clipped-bagnet", "patchguard-bagnet", "bagcert"])
def test_cells_of_a_clean_image_whose_logits_are_not_finite_prove_nothing(name):
    logits = torch.tensor([[40.0, -400.0, -400.0]] * 8)
    assert bool(pp.defense(name, Local(logits), THREAT).certify(IMAGE, torch.tensor([0])).certified)
    for value in (torch.nan, torch.inf):
        for cells, classes in product((slice(3, 6), slice(0, 8)), (0, slice(0, 3))):
            odd = logits.clone()
            odd[cells, classes] = value
            assert not bool(pp.defense(name, Local(odd), THREAT).certify(IMAGE, torch.tensor([0])).certified)


def test_local_logits_follow_the_weights_however_they_are_changed():
    class Pixels(torch.nn.Module):
        receptive_field = (1, 1, 0)

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0, -1.0, -1.0]))

        def local_logits(self, images: Tensor) -> Tensor:
            return self.weight[None, :, None, None] * (1 + images[:, :1])

    network = Pixels()
    defense = pp.defense("clipped-bagnet", network, THREAT)
    assert int(defense.predict(IMAGE)) == 0
    network.weight.data.copy_(network.weight.data.flip(0))
    assert int(defense.predict(IMAGE)) == 2


def test_votes_that_rounding_could_change_do_not_count():
    """If a vote is within τ or a softmax's rounding of the threshold, it counts only if it is for another class."""
    sure = torch.tensor([[5.0, 0.0, 0.0]] * 6 + [[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])  # with the close one 7 to 1; 2Δ = 6
    odds = torch.log(torch.tensor(THRESHOLD / (1 - THRESHOLD)))
    for tau, above, expected in ((1e-4, 1e-3, True), (1e-2, 1e-3, False), (1e-9, 4e-7, False)):
        close = torch.tensor([[float(odds) + float(torch.log(torch.tensor(2.0))) + above, 0.0, 0.0]])
        clean = torch.cat([sure, close])
        classifier = Scripted(clean, torch.zeros(1, SIZE[1], CLASSES))
        engine = measured(tau_fp32=tau)
        defense = pp.defense("derandomized-smoothing", classifier, THREAT, band=2, threshold=THRESHOLD, engine=engine)
        found = defense.certify(IMAGE, torch.tensor([0]))
        assert bool(found.certified) == expected
        assert found.evidence["votes.label"].tolist() == [7]


@pytest.mark.parametrize("name", ["derandomized-smoothing", "patchguard-smoothing"])
def test_votes_at_a_threshold_are_cast_by_the_network_as_it_is_in_float32(name):
    classifier = Scripted(torch.zeros(SIZE[1], CLASSES), torch.zeros(1, SIZE[1], CLASSES))
    defense = pp.defense(name, classifier, THREAT, engine=pp.Engine(precision="auto", compile=True))
    assert defense.engine == defense.evaluator.engine == pp.Engine()
    assert (defense.describe()["precision"], defense.describe()["compile"]) == ("fp32", False)


def test_smoothed_vit_counts_repeated_passes_and_ignores_infinite_margins():
    """In bf16 the votes of three views are decided again; a view with an infinite logit casts no sure vote."""
    clean = torch.tensor([[8.0, 0.0, 0.0]] * 6 + [[0.5, 0.0, 0.0]] * 3)
    attacks = torch.zeros(1, SIZE[1], CLASSES)
    engine = measured(tau=1.0, tau_fp32=1e-3, precision="bf16")
    options = {"band": 2, "stride": 1, "certificate": "exact"}
    label = torch.tensor([0])
    defense = pp.defense("smoothed-vit", Scripted(clean, attacks), THREAT, engine=engine, **options)
    assert defense.certify(IMAGE, label).forwards.tolist() == [SIZE[1] + 3]
    for top, expected in ((8.0, True), (torch.inf, False)):
        clean[:, 0] = top
        classifier = Scripted(clean, attacks)
        defense = pp.defense("smoothed-vit", classifier, THREAT, engine=measured(tau_fp32=1e-3), **options)
        assert bool(defense.certify(IMAGE, label).certified) == expected


def test_a_hostile_image_does_not_stop_a_smoothed_vit():
    """In bf16 the first view is off by more than τ allows, so prediction falls back to float32."""

    class Drifting(Scripted):
        def masked(self, images: Tensor, keep: Tensor) -> Tensor:
            off = 0.5 * torch.is_autocast_enabled("cpu")
            return super().masked(images, keep) - off * torch.tensor([1.0, 0.0, 0.0])

    classifier = Drifting(torch.tensor([[0.8, 0.0, 0.0]] * SIZE[1]), torch.zeros(1, SIZE[1], CLASSES))
    engine = measured(tau=0.4, tau_fp32=1e-3, precision="bf16")
    defense = pp.defense("smoothed-vit", classifier, THREAT, engine=engine, band=2, stride=1)
    with pytest.raises(TauExceededError):
        defense.certify(IMAGE, torch.tensor([0]))
    found = pp.predict(defense, [torch.zeros(1, *SIZE)])
    assert (found[0].label, found[0].certified, found.misjudged) == (0, True, 1)


class Blurred(Scripted):
    receptive_field = (1, 1, -1)


class Sized(Scripted):
    receptive_field = 9


class Single(Scripted):
    def local_logits(self, images: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(images, torch.ones(CLASSES, 1, 1, 2))


class Brightest:
    """A cell sees the brightest of 5 pixels, but claims to see one; noise in a white image changes nothing."""

    fill, receptive_field = (0.0,), (1, 1, 0)

    def __call__(self, images: Tensor) -> Tensor:
        return self.local_logits(images).mean(dim=(2, 3))

    def local_logits(self, images: Tensor) -> Tensor:
        brightest = torch.nn.functional.max_pool2d(images, (1, 5), 1, (0, 2))
        return torch.cat([0.5 - brightest, brightest - 0.5], dim=1)


class Infinite(Brightest):
    """As above, but a cell that sees a white pixel has infinite logits."""

    def local_logits(self, images: Tensor) -> Tensor:
        return super().local_logits(images) / (images != 1)


def test_a_false_receptive_field_is_refused_whatever_the_first_image_shows():
    for image in (IMAGE, IMAGE + 1, IMAGE + 0.5):
        for network in (Brightest(), Infinite()):
            with pytest.raises(CheckError, match="is not what the network has"):
                pp.defense("bagcert", network, THREAT).certify(image, torch.tensor([0]))


def test_a_false_receptive_field_is_refused_every_time():
    scripted = Blurred(torch.zeros(SIZE[1] + 1, CLASSES), torch.ones(1, SIZE[1] + 1, CLASSES))
    defense = pp.defense("bagcert", scripted, THREAT)
    for _ in range(2):
        with pytest.raises(CheckError, match="is not what the network has"):
            defense.certify(IMAGE, torch.tensor([0]))


@pytest.mark.parametrize(
    ("name", "patch", "words"),
    [
        ("smoothed-vit", 3, None),  # 2·4 of 9 views
        ("smoothed-vit", 4, "one patch of 1×4 pixels can touch 5 of 9 views; take a smaller patch, or a smaller band"),
        ("derandomized-smoothing", 3, None),
        ("derandomized-smoothing", 4, "can touch 5 of 9 views"),
        ("patchguard-smoothing", 4, "can touch 5 of 9 views"),
        ("clipped-bagnet", 3, None),  # 2·4 of 10 cells
        ("clipped-bagnet", 4, "can touch 5 of 10 cells; take a smaller patch, or a network of smaller receptive field"),
        ("bagcert", 4, "can touch 5 of 10 cells"),
        ("patchguard-bagnet", 4, "can touch 5 of 10 cells"),
    ],
)
def test_the_user_is_told_once_if_no_image_can_be_certified(name, patch, words, notes):
    """If there is no message, an image whose evidence is for one class alone is certified."""
    scripted = Scripted(torch.full((10, CLASSES), -100.0), torch.full((1, 10, CLASSES), -100.0))
    options = {"band": 2, "engine": measured()} if "smooth" in name else {}
    options |= {"stride": 1} if name == "smoothed-vit" else {}
    defense = pp.defense(name, scripted, pp.PatchThreat(SIZE, ((1, patch),)), **options)
    assert not defense.certify(IMAGE, torch.tensor([1])).certified.any()
    assert not defense.certify(IMAGE, torch.tensor([2])).certified.any()
    scripted.clean[:, 0] = 100.0
    assert defense.certify(IMAGE, torch.tensor([0])).certified.all() == (words is None)
    assert len(notes) == (words is not None)
    if words:
        assert notes[0].startswith(f"no image can be certified by {name}")
        assert words in notes[0]


@pytest.mark.parametrize("case", range(9))
def test_wrong_input_is_one_clear_line(case):
    scripted = Scripted(torch.zeros(SIZE[1] + 1, CLASSES), torch.ones(1, SIZE[1] + 1, CLASSES))
    sized, single = (kind(scripted.clean, scripted.attacks) for kind in (Sized, Single))
    needs = "needs a classifier with `local_logits`.*bagcert trains a BagNet"
    banded, label, outputs = {"band": 2, "engine": measured()}, 0, "but the classifier has the outputs 0 to 2"
    classifier, name, options, label, error, message = [
        (lambda images: images.new_zeros(len(images), CLASSES), "bagcert", {}, label, InputError, needs),
        (sized, "bagcert", {}, label, InputError, r"receptive_field must be \(size, stride, offset\)"),
        (single, "bagcert", {}, label, CheckError, "local_logits fails on float64 images of"),
        (scripted, "bagcert", {}, -1, InputError, outputs),
        (scripted, "bagcert", {}, CLASSES, InputError, outputs),
        (scripted, "derandomized-smoothing", banded, CLASSES, InputError, outputs),
        (scripted, "smoothed-vit", {}, label, InputError, "band must be from 1 to the 9 pixels"),
        (scripted, "derandomized-smoothing", {"threshold": 1.5}, label, InputError, "threshold must be"),
        (scripted, "patchguard-smoothing", {"engine": pp.Engine(precision="fp16")}, label, InputError, "in float32"),
    ][case]
    with pytest.raises(error, match=message):
        pp.defense(name, classifier, THREAT, **options).certify(IMAGE, torch.tensor([label]))
