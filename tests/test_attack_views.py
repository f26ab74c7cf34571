"""What an attacker sees: masked copies with their gradients, and what each objective aims at."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import patchproof as pp
import reference
from patchproof.attacks import FakeUnanimity, WrongMajority
from patchproof.attacks.gradient import _cross_entropy
from patchproof.attacks.losses import Scene
from patchproof.attacks.places import all_places, as_rects, hidden_by, inside
from patchproof.attacks.views import Aim, Lens, Views
from patchproof.masking import label_margin
from patchproof.models import load_classifier


@given(st.integers(0, 2**32), st.integers(1, 60), st.booleans())
@settings(max_examples=40)
def test_the_gradient_does_not_depend_on_the_chunk(seed, chunk, whole_parts):
    generator = torch.Generator().manual_seed(seed)
    threat = pp.PatchThreat((6, 7), ((2, 3),))
    masks = pp.covering_masks(threat, per_axis=2)
    classifier, views = reference.Curved((6, 7), 3, generator), Views.of(masks, (6, 7), torch.device("cpu"))
    images = torch.rand(3, 2, 6, 7, generator=generator).requires_grad_()
    labels = torch.randint(3, (3,), generator=generator)
    view = torch.randint(len(views.first), (3, 4), generator=generator)
    aim = Aim(view, torch.rand(3, 4, generator=generator) < 0.7, labels)

    def loss(logits, labels, aim):
        """Compares copies with each other, so no chunk can be looked at alone."""
        return label_margin(logits, labels).masked_fill(~aim.used, -9).logsumexp(dim=1)

    fill = torch.tensor(classifier.fill)[:, None, None]
    copies = torch.where(views.shown(view.flatten()), images.repeat_interleave(4, dim=0), fill)
    logits = classifier(copies).unflatten(0, (3, 4)).masked_fill(~aim.used[..., None], 0)
    expected = loss(logits, labels, aim)
    (slope,) = torch.autograd.grad(expected.sum(), images)
    lens = Lens(classifier, views, pp.Engine(chunk=chunk), whole_parts=whole_parts)
    value, gradient = lens.gradient(images.detach(), labels, aim, loss)
    expected = expected.detach().masked_fill(~aim.used.any(dim=1), -torch.inf)
    assert torch.allclose(value, expected, atol=1e-5)
    assert torch.allclose(gradient, slope, atol=1e-5)


class Counted(reference.Curved):
    """Notes how many images it is shown at a time; more than it has memory for are too many."""

    def __init__(self, *arguments, room=10**9):
        super().__init__(*arguments)
        self.sizes, self.room = [], room

    def __call__(self, images):
        if len(images) > self.room:
            raise torch.OutOfMemoryError("too many")
        self.sizes.append(len(images))
        return super().__call__(images)


def away(logits, labels, _aim):
    """A loss that grows as the labels lose their lead."""
    return -label_margin(logits, labels).sum(dim=1)


def three_copies_of_six(generator, *, chunk, **options):
    """The gradient of six candidates with three copies each, and the passes it took."""
    masks = pp.covering_masks(pp.PatchThreat((6, 7), ((2, 3),)), per_axis=2)
    views = Views.of(masks, (6, 7), torch.device("cpu"))
    classifier = Counted((6, 7), 3, generator, room=options.pop("room", 10**9))
    images, view = torch.rand(6, 2, 6, 7, generator=generator), torch.randint(4, (6, 3), generator=generator)
    aim = Aim(view, torch.ones(6, 3, dtype=torch.bool), torch.zeros(6, dtype=torch.int64))
    lens = Lens(classifier, views, pp.Engine(chunk=chunk), **options)
    _, gradient = lens.gradient(images, aim.wrong, aim, away)
    return gradient, classifier.sizes


@pytest.mark.parametrize(("chunk", "whole_parts", "sizes"), [
    (36, False, [9, 9]),  # three candidates of three copies fill a pass of nine; each copy is passed once
    (35, False, [6, 6, 6]),  # … and not one of eight
    (48, True, [12, 6]),  # of twelve, which is filled up to a half or a quarter
    (47, True, [11, 11]),
    (8, False, [2, 1] * 2 * 6),  # a candidate larger than a pass: its logits first, then its gradient
])  # fmt: skip
def test_copies_that_fill_a_pass_are_passed_once(generator, chunk, whole_parts, sizes):
    assert three_copies_of_six(generator, chunk=chunk, whole_parts=whole_parts)[1] == sizes


def test_an_attack_goes_on_in_smaller_chunks_when_memory_runs_out(generator):
    state = generator.get_state()
    expected, _ = three_copies_of_six(generator, chunk=72)
    found, sizes = three_copies_of_six(generator.set_state(state), chunk=72, room=5)
    assert torch.allclose(found, expected, atol=1e-6)
    assert max(sizes) <= 5
    with pytest.raises(torch.OutOfMemoryError):
        three_copies_of_six(generator, chunk=72, room=0)


class Shapes:
    """Notes how many images each form of it is shown: `compiled` or not, with gradients or without."""

    def __init__(self):
        self.seen = []

    def __call__(self, images):
        raise AssertionError("it has a fast form")

    def lowered(self, dtype, *, compiled=False):
        def fast(images):
            self.seen.append((compiled, images.requires_grad, len(images)))
            return images.flatten(1)[:, :3].to(dtype)

        return fast


def test_only_whole_passes_with_gradients_are_compiled(generator):
    masks = pp.covering_masks(pp.PatchThreat((6, 7), ((2, 3),)), per_axis=2)
    views, classifier = Views.of(masks, (6, 7), torch.device("cpu")), Shapes()
    lens = Lens(classifier, views, pp.Engine(chunk=32, precision="bf16", compile=True), whole_parts=True)
    images = torch.rand(4, 2, 6, 7, generator=generator)
    lens.logits(images, torch.arange(len(views.first)))
    assert classifier.seen
    assert not any(compiled for compiled, _, _ in classifier.seen)
    for copies, size in ((1, 4), (2, 8)):  # of four candidates: half of a pass of eight, and all of it
        classifier.seen.clear()
        view = torch.zeros(4, copies, dtype=torch.int64)
        aim = Aim(view, torch.ones_like(view, dtype=torch.bool), torch.zeros(4, dtype=torch.int64))
        lens.gradient(images, aim.wrong, aim, away)
        assert classifier.seen == [(size == 8, True, size)]


@pytest.mark.parametrize(("precision", "sure", "alike"), [
    ("bf16", 1.0, 0.98),
    ("fp16", 1.0, 0.98),
    ("bf16", 2000.0, 0.7),  # its logits are coarse, so copies weigh otherwise
    ("fp16", 2000.0, 0.98),
])  # fmt: skip
def test_a_gradient_in_fast_precision_points_where_the_exact_one_does(generator, precision, sure, alike):
    """Also where the network is sure: the slope of its cross-entropy is then far below the smallest number of fp16."""
    classifier = load_classifier("small", "random").eval()
    with torch.no_grad():
        head = [m for m in classifier.modules() if isinstance(m, torch.nn.Linear)][-1]
        head.weight.mul_(sure)
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=5)
    views = Views.of(pp.covering_masks(threat, per_axis=3), (28, 28), torch.device("cpu"))
    images = torch.rand(4, 3, 28, 28, generator=generator)
    labels = classifier(images).argmax(dim=1)
    aim = Aim(views.one_mask.expand(4, -1), torch.ones(4, 9, dtype=torch.bool), labels)

    value, exact = Lens(classifier, views, pp.Engine()).gradient(images, labels, aim, _cross_entropy)
    _, fast = Lens(classifier, views, pp.Engine(precision=precision)).gradient(images, labels, aim, _cross_entropy)
    if sure > 1:
        assert value.max() < 1e-6
    exact, fast = (g.flatten(1) / g.flatten(1).abs().amax(dim=1, keepdim=True) for g in (exact, fast))
    assert fast.dtype == torch.float32
    assert functional.cosine_similarity(exact, fast).min() > alike
    assert all(weight.grad is None for weight in classifier.parameters())


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e37])
def test_a_slope_of_any_size_is_carried_exactly(generator, size):
    views = Views.of(None, (6, 7), torch.device("cpu"))
    classifier, labels = reference.Curved((6, 7), 3, generator), torch.zeros(3, dtype=torch.int64)
    images = torch.rand(3, 2, 6, 7, generator=generator)
    aim = Aim(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool), labels)
    lens = Lens(classifier, views, pp.Engine())
    found, plain = (
        lens.gradient(images, labels, aim, lambda logits, labels, _aim, by=by: by * logits[:, 0, 0])[1]
        for by in (size, 1.0)
    )
    torch.testing.assert_close(found / size, plain)


class Broken(torch.autograd.Function):
    """The images; on the way back an infinite slope at one pixel and none at another."""

    @staticmethod
    def forward(ctx, images):
        return images.clone()

    @staticmethod
    def backward(ctx, slope):
        slope = slope.clone()
        slope[:, 0, 0, 0], slope[:, 0, 0, 1] = torch.inf, torch.nan
        return slope


class Watched(torch.autograd.Function):
    """The images; on the way back it notes which arithmetic is allowed."""

    allowed: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx, images):
        return images.clone()

    @staticmethod
    def backward(ctx, slope):
        Watched.allowed.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return slope


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True)])
def test_the_way_back_is_in_the_arithmetic_asked_for(generator, precision, allowed):
    Watched.allowed.clear()
    curved = reference.Curved((6, 7), 3, generator)
    lens = Lens(
        lambda images: curved(Watched.apply(images)),
        Views.of(None, (6, 7), torch.device("cpu")),
        pp.Engine(precision=precision),
    )
    aim = Aim(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool), torch.tensor([0]))
    lens.gradient(torch.rand(1, 2, 6, 7, generator=generator), aim.wrong, aim, lambda logits, *_: logits[:, 0, 0])
    assert Watched.allowed == [(allowed, allowed)]


class Overflows(reference.Curved):
    def __call__(self, images):
        return super().__call__(Broken.apply(images))


def test_a_pixel_without_a_gradient_keeps_still_and_the_others_climb(generator):
    views = Views.of(None, (6, 7), torch.device("cpu"))
    images, labels = torch.rand(3, 2, 6, 7, generator=generator), torch.zeros(3, dtype=torch.int64)
    aim = Aim(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool), labels)
    _, gradient = Lens(Overflows((6, 7), 3, generator), views, pp.Engine()).gradient(
        images, labels, aim, lambda logits, labels, _aim: logits.logsumexp(dim=2).sum(dim=1)
    )
    assert bool(gradient.isfinite().all())
    assert bool((gradient[:, 0, 0, :2] == 0).all())
    assert gradient[:, 1].abs().min() > 0


def test_views_are_the_unions_of_masks_and_the_whole_image(generator):
    threat = pp.PatchThreat((6, 7), ((2, 3),))
    masks = pp.covering_masks(threat, per_axis=2)
    views = Views.of(masks, (6, 7), torch.device("cpu"))
    classifier, images = reference.Curved((6, 7), 3, generator), torch.rand(2, 2, 6, 7, generator=generator)
    logits = Lens(classifier, views, pp.Engine(chunk=5)).logits(images, torch.arange(len(views.first)))
    assert torch.allclose(logits[:, views.whole], classifier(images))
    for row, image in enumerate(images):
        table = reference.two_mask_logits(classifier, image, masks)
        assert torch.allclose(logits[row][views.of_pair], torch.tensor(table), atol=1e-5)


# --- what the objectives aim at ------------------------------------------------------------------------------------


def exact_scene(seed: int):
    generator = torch.Generator().manual_seed(seed)
    threat = pp.PatchThreat((7, 6), ((2, 3),))
    masks = pp.covering_masks(threat, per_axis=3)
    classifier = reference.ExactClassifier((7, 6), 3, generator)
    images = torch.randint(0, 5, (3, 2, 7, 6), generator=generator) / 4
    views = Views.of(masks, (7, 6), torch.device("cpu"))
    logits = Lens(classifier, views, pp.Engine()).logits(images, torch.arange(len(views.first)))
    return threat, masks, classifier, images, Scene(views, classifier(images).argmax(dim=1), logits)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_promising_places_are_those_of_the_definition(seed):
    threat, masks, classifier, images, scene = exact_scene(seed)
    places = all_places(threat)
    hides = hidden_by(places, masks)
    majority, unanimity = WrongMajority().promising(scene, hides), FakeUnanimity().promising(scene, hides)
    for b, image in enumerate(images):
        table = [[reference.argmax(c) for c in row] for row in reference.two_mask_logits(classifier, image, masks)]
        label = int(scene.labels[b])
        for p, place in enumerate(as_rects(places)):
            hiding = [m for m, rect in enumerate(masks.rects) if rect.contains(place)]
            confirmed = [m for m in hiding if all(answer == label for answer in table[m])]
            assert bool(majority[b, p]) == (not confirmed)
            rows = [m for m in range(len(masks)) if m not in hiding and all(table[m][i] != label for i in hiding)]
            assert bool(unanimity[b, p]) == bool(rows)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_aims_look_at_every_copy_that_shows_the_patch_and_no_other(seed):
    threat, masks, _, _, scene = exact_scene(seed)
    draw = torch.Generator().manual_seed(seed)
    places = all_places(threat)[torch.randint(len(all_places(threat)), (3,), generator=draw)]
    attempt = torch.randint(2, (3,), generator=draw)
    shows = [
        [
            [bool((~pixels & masks.keep()[a, 0] & masks.keep()[b, 0]).any()) for b in range(len(masks))]
            for a in range(len(masks))
        ]
        for pixels in ~inside(places, threat, "cpu")[:, 0]
    ]
    n, of_pair = len(masks), scene.views.of_pair
    majority = WrongMajority().aim(scene, places, attempt)
    unanimity = FakeUnanimity().aim(scene, places, attempt)
    for b in range(3):
        assert majority.view[b, :n].tolist() == of_pair.diagonal().tolist()
        assert majority.used[b, :n].tolist() == [shows[b][m][m] for m in range(n)]
        rows = [m for m in range(n) if of_pair[m].tolist() == unanimity.view[b].tolist()]
        assert any(unanimity.used[b].tolist() == shows[b][m] for m in rows)
        assert int(unanimity.wrong[b]) != int(scene.labels[b])


def answers(*labels: int) -> torch.Tensor:
    """Logits of one image's copies that answer these labels by far."""
    return 5.0 * functional.one_hot(torch.tensor([labels]), 3).float()


def loss_of(objective, logits, used=None, wrong=1) -> float:
    view = torch.zeros(logits.shape[:2], dtype=torch.int64)
    used = torch.ones_like(view, dtype=torch.bool) if used is None else torch.tensor([used])
    return float(objective.loss(logits, torch.tensor([0]), Aim(view, used, torch.tensor([wrong]))))


def test_a_wrong_majority_wants_votes_for_one_label_and_no_row_that_confirms_the_right_one():
    """The label is 0. Three one-mask copies, then the weakest copy in the second round of each."""
    objective = WrongMajority()
    ladder = [(0, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0, 0), (1, 1, 0, 1, 1, 0), (1, 1, 0, 1, 1, 2), (1, 1, 1, 1, 1, 2)]
    losses = [loss_of(objective, answers(*step)) for step in ladder]
    assert losses == sorted(set(losses))
    assert loss_of(objective, answers(1, 1, 0, 1, 1, 0)) > loss_of(objective, answers(1, 2, 0, 1, 2, 0))
    unseen = [True, True, False, True, True, False]
    assert loss_of(objective, answers(1, 1, 0, 1, 1, 0), unseen) == loss_of(objective, answers(1, 1, 1, 1, 1, 1))


def test_a_fake_disagreer_wants_every_copy_of_its_row_and_the_last_one_most():
    objective = FakeUnanimity()
    losses = [loss_of(objective, answers(*row)) for row in [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]]
    steps = [b - a for a, b in itertools.pairwise(losses)]
    assert min(steps) > 0
    assert steps[2] > steps[0]
    assert loss_of(objective, answers(1, 1, 2)) == loss_of(objective, answers(1, 1, 0))
    assert loss_of(objective, answers(1, 1, 0), [True, True, False]) == losses[3]
