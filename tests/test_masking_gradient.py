"""Gradients of a loss over masked copies, as attacks use them: in chunks and in any precision."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import patchproof as pp
import reference
from patchproof.masking import Aim, Evaluator, Views, label_margin
from patchproof.models import load_classifier
from patchproof.types import InputError

MASKS = pp.covering_masks(pp.PatchThreat((6, 7), ((2, 3),)), per_axis=2)


def all_views() -> Views:
    return Views.of(MASKS.keep(), MASKS.unions.first, MASKS.unions.second)


def evaluator_of(classifier, *, fixed: bool = False, **engine) -> Evaluator:
    """With `fixed`, batches have few sizes, as on a GPU."""
    found = Evaluator(classifier, pp.Engine(**engine))
    if fixed:
        found.fixed = lambda _images: True
    return found


@given(st.integers(0, 2**32), st.integers(1, 60), st.booleans())
@settings(max_examples=40)
def test_the_gradient_is_autograds_whatever_the_chunk_also_through_the_classifiers_own_masking(seed, chunk, fixed):
    generator, views = torch.Generator().manual_seed(seed), all_views()
    classifier = (reference.Curved, reference.CurvedMasking)[seed % 2]((6, 7), 3, generator)
    images = torch.rand(3, 2, 6, 7, generator=generator).requires_grad_()
    labels = torch.randint(3, (3,), generator=generator)
    view = torch.randint(len(views.first), (3, 4), generator=generator)
    aim = Aim(view, torch.rand(3, 4, generator=generator) < 0.7, labels)

    def loss(logits, labels, aim):
        """Compares copies with each other, so no chunk can be looked at alone."""
        return label_margin(logits, labels).masked_fill(~aim.used, -9).logsumexp(dim=1)

    keep = views.shown(view.flatten())
    copies = torch.where(keep, images.repeat_interleave(4, dim=0), torch.tensor(classifier.fill)[:, None, None])
    logits = classifier.masked(copies, keep) if hasattr(classifier, "masked") else classifier(copies)
    expected = loss(logits.unflatten(0, (3, 4)).masked_fill(~aim.used[..., None], 0), labels, aim)
    (slope,) = torch.autograd.grad(expected.sum(), images)
    evaluator = evaluator_of(classifier, fixed=fixed, batch_size=chunk)
    value, gradient = evaluator.gradient(images.detach(), labels, views, aim, loss)
    expected = expected.detach().masked_fill(~aim.used.any(dim=1), -torch.inf)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-5)


class Counted(reference.Curved):
    """A classifier that notes its batch sizes and runs out of memory beyond `room` images at once."""

    def __init__(self, *arguments, room=10**9):
        super().__init__(*arguments)
        self.sizes, self.room = [], room

    def __call__(self, images):
        if len(images) > self.room:
            raise torch.OutOfMemoryError("too many")
        self.sizes.append(len(images))
        return super().__call__(images)


def away(logits, labels, _aim):
    """A loss that grows as the labels' margins shrink."""
    return -label_margin(logits, labels).sum(dim=1)


def three_copies_of_six(*, chunk, fixed=False, room=10**9):
    """The gradient of six candidates with three copies each, and the sizes of the passes."""
    generator = torch.Generator().manual_seed(7)
    classifier = Counted((6, 7), 3, generator, room=room)
    images, view = torch.rand(6, 2, 6, 7, generator=generator), torch.randint(4, (6, 3), generator=generator)
    aim = Aim(view, torch.ones(6, 3, dtype=torch.bool), torch.zeros(6, dtype=torch.int64))
    evaluator = evaluator_of(classifier, fixed=fixed, batch_size=chunk)
    return evaluator.gradient(images, aim.wrong, all_views(), aim, away)[1], classifier.sizes


@pytest.mark.parametrize(("chunk", "fixed", "sizes"), [
    (36, False, [9, 9]),  # three candidates of three copies fill a pass of nine; each copy is passed once
    (35, False, [6, 6, 6]),  # … and not one of eight
    (48, True, [12, 6]),  # of twelve, which is filled up to a half or a quarter
    (47, True, [11, 11]),
    (8, False, [2, 1] * 2 * 6),  # a candidate larger than a pass: its logits first, then its gradient
])  # fmt: skip
def test_copies_that_fill_a_pass_are_passed_once(chunk, fixed, sizes):
    assert three_copies_of_six(chunk=chunk, fixed=fixed)[1] == sizes


def test_an_attack_goes_on_in_smaller_chunks_when_memory_runs_out():
    found, sizes = three_copies_of_six(chunk=72, room=5)
    assert torch.allclose(found, three_copies_of_six(chunk=72)[0], atol=1e-6)
    assert max(sizes) <= 5
    with pytest.raises(torch.OutOfMemoryError):
        three_copies_of_six(chunk=72, room=0)


class Shapes:
    """A classifier whose fast form notes for each batch: compiled?, with gradients?, how many images."""

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
    classifier, images = Shapes(), torch.rand(4, 2, 6, 7, generator=generator)
    evaluator = Evaluator(classifier, pp.Engine(batch_size=32, precision="bf16", compile=True))
    for copies, size in ((1, 4), (2, 8)):  # copies of four candidates fill half of a pass of eight, or all of it
        classifier.seen.clear()
        view = torch.zeros(4, copies, dtype=torch.int64)
        aim = Aim(view, torch.ones_like(view, dtype=torch.bool), torch.zeros(4, dtype=torch.int64))
        evaluator.gradient(images, aim.wrong, all_views(), aim, away)
        assert classifier.seen == [(size == 8, True, size)]


def cross_entropy(logits, labels, _aim):
    copies = labels[:, None].expand(logits.shape[:2])
    return functional.cross_entropy(logits.flatten(0, 1), copies.flatten(), reduction="none").view_as(copies).sum(dim=1)


@pytest.mark.parametrize(("precision", "sure", "alike"), [
    ("bf16", 1.0, 0.98),
    ("fp16", 1.0, 0.98),
    ("bf16", 2000.0, 0.7),  # coarse logits change the weight of each copy
    ("fp16", 2000.0, 0.98),
])  # fmt: skip
def test_a_gradient_in_fast_precision_points_where_the_exact_one_does(generator, precision, sure, alike):
    """If the network is sure, the slope of its cross-entropy is far below the smallest number of fp16."""
    classifier = load_classifier("small", "random").eval()
    with torch.no_grad():
        [m for m in classifier.modules() if isinstance(m, torch.nn.Linear)][-1].weight.mul_(sure)
    masks = pp.covering_masks(pp.PatchThreat.square(image_size=(28, 28), pixels=5), per_axis=3)
    views = Views.of(masks.keep(), torch.arange(9), torch.arange(9))
    images = torch.rand(4, 3, 28, 28, generator=generator)
    labels = classifier(images).argmax(dim=1)
    aim = Aim(torch.arange(9).expand(4, -1), torch.ones(4, 9, dtype=torch.bool), labels)
    (value, exact), (_, fast) = (
        Evaluator(classifier, pp.Engine(precision=p)).gradient(images, labels, views, aim, cross_entropy)
        for p in ("fp32", precision)
    )
    if sure > 1:
        assert value.max() < 1e-6
    exact, fast = (g.flatten(1) / g.flatten(1).abs().amax(dim=1, keepdim=True) for g in (exact, fast))
    assert fast.dtype == torch.float32
    assert functional.cosine_similarity(exact, fast).min() > alike
    assert all(weight.grad is None for weight in classifier.parameters())


def slope_of(classifier, loss, *, count=3, **engine):
    """∂loss/∂pixels of some unmasked images."""
    images = torch.rand(count, 2, 6, 7, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(count, dtype=torch.int64)
    aim = Aim(labels[:, None], torch.ones(count, 1, dtype=torch.bool), labels)
    whole = Views.of(torch.ones(0, 1, 6, 7, dtype=torch.bool), labels[:0], labels[:0])
    return evaluator_of(classifier, **engine).gradient(images, labels, whole, aim, loss)[1]


@pytest.mark.parametrize("size", [1e-30, 1e37])
def test_a_slope_of_any_size_is_carried_exactly(generator, size):
    classifier = reference.Curved((6, 7), 3, generator)
    found, plain = (slope_of(classifier, lambda logits, *_, by=by: by * logits[:, 0, 0]) for by in (size, 1.0))
    torch.testing.assert_close(found / size, plain)


class Broken(torch.autograd.Function):
    """The identity; its backward pass makes one slope infinite and one NaN, and notes the arithmetic."""

    allowed: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx, images):
        return images.clone()

    @staticmethod
    def backward(ctx, slope):
        Broken.allowed.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        slope = slope.clone()
        slope[:, 0, 0, 0], slope[:, 0, 0, 1] = torch.inf, torch.nan
        return slope


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True)])
def test_a_pixel_without_a_finite_slope_gets_none_and_the_backward_pass_has_the_arithmetic_asked_for(
    generator, precision, allowed
):
    Broken.allowed.clear()
    curved = reference.Curved((6, 7), 3, generator)
    gradient = slope_of(
        lambda images: curved(Broken.apply(images)),
        lambda logits, *_: logits.logsumexp(dim=2).sum(dim=1),
        precision=precision,
    )
    assert Broken.allowed == [(allowed, allowed)]
    assert bool(gradient.isfinite().all())
    assert bool((gradient[:, 0, 0, :2] == 0).all())
    assert gradient[:, 1].abs().min() > 0


def test_a_classifier_that_passes_no_gradient_is_refused():
    weight = torch.ones(84, 3, requires_grad=True)
    for blind in (lambda images: images.detach().flatten(1), lambda images: images.detach().flatten(1) @ weight):
        with pytest.raises(InputError, match="passes no gradient to its input"):
            slope_of(blind, lambda logits, *_: logits[:, 0, 0])
