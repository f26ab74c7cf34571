"""Masked evaluation: what the classifier sees, in which chunks, and when a label counts."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchproof as pp
import reference
from patchproof.masking import Copies, Evaluator, fill_colour, images_ahead, label_margin, network, top_two
from patchproof.masking._memory import BYTES_PER_PIXEL
from patchproof.models import ImageClassifier
from patchproof.types import CheckError, InputError

THREAT = pp.PatchThreat.square(image_size=(9, 9), pixels=2)
MASKS = pp.covering_masks(THREAT, per_axis=3)
BF16 = reference.measured(precision="bf16", tau=0.1)


class Camera:
    """A classifier that keeps every batch it is given and runs out of memory beyond `room` images at once."""

    fill = (0.25, 0.75)

    def __init__(self, room: int = 10**6):
        self.seen, self.room = [], room
        self.weight = torch.randint(-3, 4, (162, 3), generator=torch.Generator().manual_seed(0)).float()

    def __call__(self, images):
        self.seen.append(images)
        if len(images) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return images.flatten(1) @ self.weight

    @property
    def sizes(self):
        return [len(images) for images in self.seen]


@given(st.integers(1, 60), st.integers(0, 2**32))
def test_the_classifier_sees_exactly_the_visible_pixels_one_chunk_at_a_time(chunk, seed):
    generator, camera = torch.Generator().manual_seed(seed), Camera()
    images = torch.rand(3, 2, 9, 9, generator=generator)
    copies = Copies(*(torch.randint(high, (20,), generator=generator) for high in (3, 9, 9)))
    evaluator = Evaluator(camera, pp.Engine(batch_size=chunk))
    logits = evaluator.evaluate(images, MASKS.keep(), copies, lambda logits, _: logits)
    assert camera.sizes == [chunk] * (20 // chunk) + [20 % chunk] * (20 % chunk > 0)
    assert evaluator.passes == len(logits) == 20
    for copy, image, a, b in zip(torch.cat(camera.seen), *(t.tolist() for t in copies), strict=True):
        assert torch.equal(copy, reference.hide(images[image], (MASKS.rects[a], MASKS.rects[b]), camera.fill))


def test_nothing_is_kept_of_a_batch_but_its_answers_in_one_tensor():
    """Small tensors kept from each batch fragmented the heap, which grew by one batch at each pass."""
    alive = []

    def read(logits, _):
        alive.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))
        return logits

    evaluator = Evaluator(lambda images: images.mean((2, 3)), pp.Engine(batch_size=2))
    images, every = torch.rand(20, 2, 9, 9), torch.arange(20)
    found = evaluator.evaluate(images, MASKS.keep(), Copies(every, every % 9, every % 9), read)
    assert alive[1] == alive[-1]
    assert len(alive) == 10
    assert found.shape == (20, 2)


def test_the_fill_is_the_classifiers_own_and_grey_without_one():
    images = torch.zeros(1, 2, 9, 9)
    assert fill_colour(Camera(), images).flatten().tolist() == [0.25, 0.75]
    assert fill_colour(lambda x: x, images).flatten().tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="fill has 2 channels, the images have 1"):
        fill_colour(Camera(), images[:, :1])
    keep = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    assert pp.occlude(images, keep, Camera.fill)[0, :, 0, 0].tolist() == [0.25, 0.75]
    with pytest.raises(ValueError, match="fill must be one number for each of the 2 channels"):
        pp.occlude(images, keep, (0.5,) * 9)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 3))
def test_label_gap_and_margin_equal_their_definitions_ties_included(rows, label):
    logits = torch.tensor(rows, dtype=torch.float32)
    labels, gaps = top_two(logits)
    margins = label_margin(logits, torch.full((len(rows),), label))
    for row, found, gap, margin in zip(rows, labels.tolist(), gaps.tolist(), margins.tolist(), strict=True):
        assert found == reference.argmax(row)
        assert gap == reference.margin_of(row, found)
        assert margin == reference.margin_of(row, label)


def test_evaluation_leaves_no_graph_and_the_global_arithmetic_as_it_was_and_needs_eval_mode():
    model, image = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.zeros(1, 1, 2, 2)
    with pytest.raises(CheckError, match="is in training mode; call classifier"):
        network(model)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    for precision in ("fp32", "tf32", "bf16"):
        logits = network(model.eval(), precision=precision)(image, None)
        assert not logits.requires_grad
        assert logits.dtype == torch.float32
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


@pytest.mark.parametrize(("settings", "message"), [
    ({"batch_size": 0}, "batch_size must be a positive number or `auto`, not 0"),
    ({"tau_fp32": 0.0}, "tau cannot be negative and tau_fp32 must be above 0"),
    ({"tau": float("nan")}, "tau cannot be negative and tau_fp32 must be above 0"),
    ({"precision": "bf16"}, "bf16 labels need a τ above 0 to count"),
    ({"tau_fp32": 0.1, "tau_tf32": 0.0}, "tau_tf32 must be at least"),
    ({"precision": "auto"}, "`auto` is for Engine"),
    ({"compile": "auto"}, "`auto` is for Engine"),
])  # fmt: skip
def test_wrong_engine_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        reference.measured(**settings)


# --- memory and shapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 3, 7, 64])
def test_running_out_of_memory_halves_the_chunk_for_good_and_changes_no_answer(generator, room):
    images = torch.randint(0, 3, (4, 2, 9, 9), generator=generator).float()
    copies = Copies(torch.arange(4).repeat_interleave(9), *[torch.arange(9).repeat(4)] * 2)
    expected = Evaluator(Camera(), pp.Engine()).answers(images, MASKS.keep(), copies)
    camera = Camera(room)
    evaluator = Evaluator(camera, pp.Engine(batch_size=64))
    for _ in range(2):
        found = evaluator.answers(images, MASKS.keep(), copies)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    failed = sum(size > room for size in camera.sizes)
    assert evaluator.chunk == 64 // 2**failed
    assert failed <= 6, "found out once, not in every batch"
    assert evaluator.passes == 2 * 36
    with pytest.raises(torch.OutOfMemoryError):
        Evaluator(Camera(room=0), pp.Engine(batch_size=4)).labels(images)


def test_on_a_cpu_which_lends_more_memory_than_it_has_the_chunk_is_halved_beforehand(generator, monkeypatch):
    monkeypatch.setattr("patchproof.masking._memory.free_memory", lambda: 5 * BYTES_PER_PIXEL * 9 * 9)
    images, camera = torch.rand(40, 2, 9, 9, generator=generator), Camera()
    Evaluator(camera, pp.Engine(batch_size=64)).labels(images)
    assert set(camera.sizes) == {4}


class Compilable(nn.Module):
    """A classifier whose fast form keeps every batch it is given, and whether the form was compiled."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, images):
        return images.flatten(1)[:, :3]

    def lowered(self, dtype, *, compiled=False):
        def fast(images):
            self.seen.append((compiled, images))
            return images.flatten(1)[:, :3].to(dtype)

        return fast


@given(st.integers(1, 200), st.integers(1, 500), st.sampled_from([torch.contiguous_format, torch.channels_last]))
@settings(max_examples=30)
def test_compiled_passes_have_one_shape_and_layout_and_padding_wastes_less_than_half(chunk, count, layout):
    images = torch.rand(3, 2, 9, 9, generator=torch.Generator().manual_seed(0)).to(memory_format=layout)
    classifier = Compilable().eval()
    evaluator = Evaluator(classifier, pp.Engine(batch_size=chunk, precision="bf16", compile=True))
    copies = Copies(torch.arange(count) % 3, *[torch.arange(count) % 9] * 2)
    read = []
    logits = evaluator.evaluate(images, MASKS.keep(), copies, lambda logits, rows: (read.append(rows), logits)[1])
    assert torch.equal(logits, Evaluator(Compilable().eval(), pp.Engine(precision="bf16")).evaluate(
        images, MASKS.keep(), copies, lambda logits, _: logits))  # fmt: skip
    assert [row for rows in read for row in range(rows.start, rows.stop)] == list(range(count))
    for rows, (compiled, batch) in zip(read, classifier.seen, strict=True):
        size, wanted, smallest = len(batch), rows.stop - rows.start, max(1, chunk // 8)
        assert size in (chunk, max(1, chunk // 4), smallest)
        assert compiled == (size == chunk)
        assert wanted <= size
        assert 2 * wanted >= size or size == smallest
        assert batch.is_contiguous(memory_format=layout), "another layout would be compiled anew, and convolved slowly"


def test_images_arrive_in_order_with_their_items_and_errors_arrive_last():
    def batches():
        yield "a", torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
        yield "b", torch.zeros(2, 3, 2, 2)
        raise OSError("disk")

    arrived = images_ahead(batches(), torch.device("cpu"))
    name, images = next(arrived)
    assert (name, images.dtype, images.unique().tolist()) == ("a", torch.float32, [1.0])
    assert next(arrived)[0] == "b"
    with pytest.raises(OSError, match="disk"):
        next(arrived)


# --- fast labels and τ -----------------------------------------------------------------------------------------------


class TwoWays:
    """A classifier with constant logits: `fast` in a fast precision and `exact` in float32."""

    def __init__(self, fast, exact):
        self.fast, self.exact = torch.tensor([fast]), torch.tensor([exact])

    def __call__(self, images):
        return (self.fast if torch.is_autocast_enabled("cpu") else self.exact).expand(len(images), -1)


@pytest.mark.parametrize(
    ("fast", "exact", "label", "passes"),
    [
        ((0.0, 0.5), (0.5, 0.0), 1, 1),
        ((0.0, 0.04), (0.04, 0.0), 0, 2),
        ((torch.inf, 0.0), (0.0, 1.0), 1, 2),  # an overflow is no lead
        ((torch.nan, 0.0), (0.0, 1.0), 1, 2),
    ],
)
def test_a_fast_label_within_tau_is_decided_again_in_float32(fast, exact, label, passes):
    classifier, images = TwoWays(fast, exact), torch.zeros(2, 1, 9, 9)
    assert Evaluator(classifier, BF16).labels(images).tolist() == [label] * 2
    defense = pp.PatchCleanser(classifier, MASKS, THREAT, engine=BF16)
    found = defense.assess(images, torch.tensor([label, 1 - label]))
    assert found.predictions.tolist() == [label] * 2
    assert found.certificates.certified.tolist() == [True, False]
    assert found.certificates.forwards[0] == passes * len(MASKS.unions)


def test_images_are_prepared_once_and_answers_are_those_of_each_copy_alone():
    """This holds with a mask colour other than the mean, with NaN in hidden pixels, and for a classifier whose forward
    does more than prepare images: a subclass, one with a hook, one with another forward."""

    class Louder(ImageClassifier):
        def forward(self, images):
            return 2 * super().forward(images)

    generator = torch.Generator().manual_seed(0)
    images, keep = torch.rand(4, 3, 9, 9, generator=generator), MASKS.keep()
    images[0, :, :2, :2] = torch.nan
    image, first, second = (torch.randint(n, (60,), generator=generator) for n in (4, len(keep), len(keep)))
    kinds = ((ImageClassifier, None), (ImageClassifier, (0.1, 0.9, 0.3)), (Louder, None))
    changes = (
        lambda classifier: None,
        lambda classifier: classifier.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,)),
        lambda classifier: setattr(classifier, "forward", lambda images: classifier.module(images)),
    )
    for (kind, fill), change in itertools.product(kinds, changes):
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(243, 5))
        shape = {"input_size": (9, 9), "num_classes": 5}
        classifier = kind(module, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), fill=fill, **shape).eval()
        change(classifier)
        evaluator = Evaluator(classifier, pp.Engine(batch_size=7))
        found = evaluator.evaluate(images, keep, Copies(image, first, second), lambda logits, _: logits)
        colour = torch.tensor(classifier.fill)[:, None, None]
        for copy, answer in enumerate(found):
            shown = torch.where(keep[first[copy]] & keep[second[copy]], images[image[copy]], colour)
            torch.testing.assert_close(answer, classifier(shown[None])[0].detach(), equal_nan=True)
    assert not found.isnan().all()


def test_a_certificate_asks_only_whether_a_label_is_the_images_own():
    """Labels 1 and 2 are tied in the fast pass, so float32 decides which of them wins. Neither is label 0, which is all
    that a certificate for label 0 asks."""
    classifier, images = TwoWays((0.0, 1.0, 0.96), (0.0, 0.97, 1.0)), torch.zeros(1, 1, 9, 9)
    every = pp.PatchCleanser(classifier, MASKS, THREAT, engine=BF16, exhaustive=True)
    for label, passes in ((0, 1), (1, 2), (2, 2)):
        found = every.certify(images, torch.tensor([label]))
        assert (found.certified.tolist(), found.forwards.tolist()) == ([label == 2], [passes * len(MASKS.unions)])
    assert every.assess(images, torch.tensor([0])).predictions.tolist() == [2]
    table = every.pairs(images, torch.tensor([0]))
    table.evaluate_all(settle=False)
    table.against(torch.tensor([1]))
    assert not table.right().any(), "a cell that was not settled is unknown for another label"
    table.evaluate_all()
    assert table.label.unique().tolist() == [2]


def test_an_infinite_float32_lead_certifies_nothing():
    infinite = pp.PatchCleanser(TwoWays((0.0, 0.0), (torch.inf, 0.0)), MASKS, THREAT, engine=reference.measured())
    assert not infinite.certify(torch.zeros(1, 1, 9, 9), torch.tensor([0])).certified.any()


@pytest.mark.parametrize(
    ("fast", "exact", "change"),
    [
        ((0.05, 0.0, 0.0), (0.0, 0.07, 0.0), 0.12),  # flipped: both lead by little, yet the first label lost 0.12
        ((0.05, 0.0, 0.0), (-2.0, 0.02, 0.0), 2.07),  # the new label leads by 0.02 alone, over another one
        ((0.05, 0.0, 0.0), (5.0, 0.0, 0.0), 4.95),
    ],
)
def test_a_fast_labels_margin_that_changes_by_more_than_tau_ends_a_certification(fast, exact, change):
    """The difference of the two top-1 margins is 0.02, 0.03 and 4.95: a flip between near-ties would be missed."""
    classifier, images = TwoWays(fast, exact), torch.zeros(1, 1, 9, 9)
    defense = pp.PatchCleanser(classifier, MASKS, THREAT, engine=BF16)
    with pytest.raises(CheckError, match=rf"changed by {change} between bf16 and fp32, more than the 0.1 that .* τ"):
        defense.certify(images, torch.tensor([0]))
    lenient = Evaluator(classifier, BF16, strict=False)
    assert lenient.labels(images).tolist() == [reference.argmax(exact)]
    assert len(lenient.audit.exceeded) == 1
    redone = lenient.audit.redone[0]
    assert (redone.steps, redone.largest_change) == ({"fp32": 1}, pytest.approx(change))
    assert redone.shares == [0] * 9 + [1]


class ThreeWays(TwoWays):
    """A third answer in TF32, which no CPU has: recognised by torch's switch for it."""

    def __init__(self, fast, between, exact):
        super().__init__(fast, exact)
        self.between = torch.tensor([between])

    def __call__(self, images):
        if not torch.is_autocast_enabled("cpu") and torch.backends.cuda.matmul.allow_tf32:
            return self.between.expand(len(images), -1)
        return super().__call__(images)


@pytest.mark.parametrize(
    ("fast", "between", "exact", "label", "steps"),
    [
        ((0.0, 0.5), (9.0, 0.0), (9.0, 0.0), 1, {}),
        ((0.0, 0.05), (0.04, 0.0), (9.0, 0.0), 0, {"tf32": 1}),
        ((0.0, 0.05), (0.0, 0.02), (0.005, 0.0), 0, {"fp32": 1}),
        ((0.0, 0.05), (torch.nan, 0.0), (0.01, 0.0), 0, {"fp32": 1}),
    ],
)
def test_a_label_is_decided_in_the_first_precision_that_suffices(fast, between, exact, label, steps):
    engine = reference.measured(precision="bf16", tau=0.1, tau_tf32=0.03, tau_fp32=1e-6)
    evaluator = Evaluator(ThreeWays(fast, between, exact), engine)
    found = evaluator.answers(torch.zeros(1, 1, 9, 9), None, Copies.unmasked(1))
    assert (found.label.tolist(), found.passes.tolist()) == ([label], [{"": 1, "tf32": 2, "fp32": 3}["".join(steps)]])
    assert evaluator.audit.redone[0].steps == steps


def test_a_change_above_tau_between_any_two_steps_is_found():
    engine = reference.measured(precision="bf16", tau=0.1, tau_tf32=0.03, tau_fp32=1e-6)
    ways = [((0.05, 0.0), (0.0, 0.2), "bf16 and tf32"), ((0.05, 0.0), (0.01, 0.0), "tf32 and fp32")]
    for fast, between, steps in ways:
        evaluator = Evaluator(ThreeWays(fast, between, (0.06, 0.0)), engine)
        with pytest.raises(CheckError, match=f"between {steps}"):
            evaluator.labels(torch.zeros(1, 1, 9, 9))


def test_a_fast_precision_may_use_up_tau_minus_the_share_of_float32():
    """A certificate in float32 at its own τ, answered in bf16, needs both shares."""
    engine = reference.measured(precision="bf16", tau=0.1, tau_fp32=0.04)
    for change, exceeded in ((0.05, set()), (0.07, {0})):
        lenient = Evaluator(TwoWays((0.05, 0.0), (0.05 + change, 0.0)), engine, strict=False)
        lenient.labels(torch.zeros(1, 1, 9, 9))
        assert lenient.audit.exceeded == exceeded


def test_fast_labels_without_a_measured_tau_are_refused():
    defense = pp.PatchCleanser(TwoWays((1.0, 0.0), (1.0, 0.0)), MASKS, THREAT, engine=pp.Engine(precision="bf16"))
    with pytest.raises(InputError, match="no τ has been measured for these bf16 labels"):
        defense.predict(torch.zeros(1, 1, 9, 9))
