"""Masked evaluation: what the classifier sees, in which chunks, and when a label counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import patchproof as pp
import reference
from patchproof.masking import (
    Copies,
    Runner,
    TwoMaskTable,
    clean_labels,
    fill_colour,
    forward,
    images_ahead,
    label_margin,
    padded,
    top_two,
)


class Chunks:
    """Remembers the size of every batch it was given."""

    def __init__(self):
        self.sizes: list[int] = []

    def __call__(self, images):
        self.sizes.append(len(images))
        return images.flatten(1)[:, :3]


@pytest.fixture
def masks():
    return pp.covering_masks(pp.PatchThreat.square(image_size=(9, 9), pixels=2), per_axis=3)


def test_the_classifier_sees_exactly_the_pixels_the_masks_leave(masks, generator):
    images = torch.rand(2, 2, 9, 9, generator=generator)
    seen = []

    class Camera:
        fill = (0.25, 0.75)

        def __call__(self, batch):
            seen.append(batch)
            return batch.flatten(1)[:, :2]

    copies = Copies(torch.tensor([0, 1, 1]), torch.tensor([0, 4, 8]), torch.tensor([0, 2, 8]))
    runner = Runner(Camera(), pp.Engine(chunk=2))
    runner.evaluate(images, masks.keep(), copies, lambda logits, _: logits)
    for copy, image, a, b in zip(torch.cat(seen), *(t.tolist() for t in copies), strict=True):
        assert torch.equal(copy, reference.hide(images[image], (masks.rects[a], masks.rects[b]), Camera.fill))


@given(st.integers(1, 60))
def test_no_forward_pass_is_larger_than_the_chunk(chunk):
    masks = pp.covering_masks(pp.PatchThreat.square(image_size=(9, 9), pixels=2), per_axis=3)
    classifier = Chunks()
    pp.two_mask_labels(classifier, torch.zeros(3, 1, 9, 9), masks, engine=pp.Engine(chunk=chunk))
    assert max(classifier.sizes) <= chunk
    assert sum(classifier.sizes) == 3 * len(masks.unions)
    assert all(size == chunk for size in classifier.sizes[:-1])


def test_the_fill_is_the_classifiers_own_and_grey_without_one(masks):
    images = torch.zeros(1, 3, 9, 9)
    with_fill = type("WithFill", (), {"fill": (0.1, 0.2, 0.3), "__call__": lambda self, x: x})()
    assert fill_colour(with_fill, images).flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert fill_colour(lambda x: x, images).flatten().tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="fill has 3 channels, the images have 1"):
        fill_colour(with_fill, images[:, :1])


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 3))
def test_label_gap_and_margin_equal_their_definitions_ties_included(rows, label):
    logits = torch.tensor(rows, dtype=torch.float32)
    labels, gaps = top_two(logits)
    margins = label_margin(logits, torch.full((len(rows),), label))
    for row, found, gap, margin in zip(rows, labels.tolist(), gaps.tolist(), margins.tolist(), strict=True):
        assert found == reference.argmax(row)
        assert gap == reference.margin_of(row, found)
        assert margin == reference.margin_of(row, label)


def test_a_classifier_in_training_mode_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(pp.types.CheckError, match="training mode"):
        forward(model, torch.zeros(1, 1, 2, 2))


def test_evaluation_leaves_no_graph_and_the_global_arithmetic_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    for precision in ("fp32", "tf32", "bf16"):
        logits = forward(model, torch.zeros(1, 1, 2, 2), precision=precision)
        assert not logits.requires_grad
        assert logits.dtype == torch.float32
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


class Wobbly:
    """Says 1 in fast arithmetic and 0 in float32, by a lead of `lead`."""

    def __init__(self, lead: float):
        self.lead = lead

    def __call__(self, images):
        fast = torch.is_autocast_enabled("cpu")
        return torch.tensor([[0.0, self.lead] if fast else [self.lead, 0.0]]).expand(len(images), -1)


@pytest.mark.parametrize(("lead", "label", "passes"), [(0.5, 1, 1), (0.04, 0, 2)])
def test_a_fast_label_within_tau_is_decided_again_in_float32(masks, lead, label, passes):
    engine = pp.Engine(precision="bf16", tau=0.1)
    images = torch.zeros(2, 1, 9, 9)
    table = TwoMaskTable(Runner(Wobbly(lead), engine), images, masks)
    assert table.one_mask_labels().unique().tolist() == [label]
    assert table.forwards.tolist() == [passes * 9] * 2
    assert clean_labels(Runner(Wobbly(lead), engine), images).tolist() == [label] * 2


def test_a_lead_below_the_float32_tau_certifies_nothing(masks):
    threat = pp.PatchThreat.square(image_size=(9, 9), pixels=2)
    images, labels = torch.zeros(1, 1, 9, 9), torch.zeros(1, dtype=torch.int64)
    for tau, certified in ((0.04, True), (0.06, False)):
        engine = pp.Engine(tau_fp32=tau)
        assert (
            bool(pp.PatchCleanser(Wobbly(0.05), masks, threat, engine=engine).certify(images, labels).certified)
            is certified
        )


def test_wrong_engine_settings_are_refused():
    with pytest.raises(ValueError, match="at least one masked copy, not 0"):
        pp.Engine(chunk=0)
    with pytest.raises(ValueError, match="cannot be negative"):
        pp.Engine(tau_fp32=-1.0)
    with pytest.raises(ValueError, match="cannot be negative"):
        pp.Engine(tau=float("nan"))


def test_a_certificate_without_a_label_is_refused(masks):
    with pytest.raises(ValueError, match="a certificate is about a label"):
        TwoMaskTable(Runner(lambda x: x.flatten(1), pp.Engine()), torch.zeros(1, 1, 9, 9), masks).right()


# --- the engine ------------------------------------------------------------------------------------------------------


class Crowded:
    """A linear classifier whose device holds at most `room` images at once."""

    def __init__(self, room: int):
        self.room, self.sizes = room, []
        self.weight = torch.randint(-3, 4, (81, 3), generator=torch.Generator().manual_seed(0)).float()

    def __call__(self, images):
        self.sizes.append(len(images))
        if len(images) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return images.flatten(1) @ self.weight


@pytest.mark.parametrize("room", [1, 3, 7, 64])
def test_running_out_of_memory_halves_the_chunk_for_good_and_changes_no_answer(masks, generator, room):
    images = torch.randint(0, 3, (4, 1, 9, 9), generator=generator).float()
    expected = pp.two_mask_labels(Crowded(room=10**6), images, masks)
    classifier = Crowded(room)
    runner = Runner(classifier, pp.Engine(chunk=64))
    for _ in range(2):
        table = TwoMaskTable(runner, images, masks)
        table.evaluate_all()
        assert torch.equal(table.label[:, table.of_pair], expected)
    assert runner.chunk == 64 // 2 ** sum(size > room for size in classifier.sizes)
    assert sum(size > room for size in classifier.sizes) <= 6  # found out once, not in every batch
    assert runner.passes == 2 * 4 * len(masks.unions)


def test_memory_for_not_even_one_image_is_an_error(masks):
    with pytest.raises(torch.OutOfMemoryError):
        pp.two_mask_labels(Crowded(room=0), torch.zeros(1, 1, 9, 9), masks, engine=pp.Engine(chunk=4))


def test_other_errors_are_not_taken_for_lack_of_memory(masks):
    def broken(images):
        raise RuntimeError("expected scalar type Half")

    with pytest.raises(RuntimeError, match="scalar type Half"):
        pp.two_mask_labels(broken, torch.zeros(1, 1, 9, 9), masks)


class Shapes(nn.Module):
    """Offers a fast form of itself that remembers the batches it was given."""

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []

    def forward(self, images):
        return images.flatten(1)[:, :3]

    def lowered(self, dtype, *, compiled=False):
        def fast(images):
            self.seen.append(len(images) if compiled else -len(images))
            return images.flatten(1)[:, :3].to(dtype)

        return fast


def test_compiled_passes_have_one_shape_and_a_few_copies_are_not_padded(masks, generator):
    images, classifier = torch.rand(3, 1, 9, 9, generator=generator), Shapes().eval()
    engine = pp.Engine(chunk=32, precision="bf16", tau=0.1, compile=True)
    found = pp.two_mask_labels(classifier, images, masks, engine=engine)
    assert {size for size in classifier.seen if size > 0} == {32}
    assert {size for size in classifier.seen if size < 0} <= {-8}
    assert torch.equal(found, pp.two_mask_labels(classifier, images, masks))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_padding_repeats_the_last_image_and_keeps_the_layout(layout, generator):
    """Another layout would be compiled anew, and convolved slowly."""
    images = torch.rand(3, 2, 4, 5, generator=generator).to(memory_format=layout)
    filled = padded(images, 7)
    assert torch.equal(filled, torch.cat([images, *[images[-1:]] * 4]))
    assert filled.is_contiguous(memory_format=layout)
    assert padded(images, 2) is images
    (slope,) = torch.autograd.grad(padded(images.requires_grad_(), 7).sum(), images)
    assert torch.equal(slope, torch.ones_like(images)), "nobody asks for the gradient of what fills a batch up"


@given(st.integers(1, 600), st.integers(0, 2000))
def test_batches_of_fixed_sizes_take_everything_once_and_waste_less_than_half(chunk, count):
    runner = Runner(lambda x: x, pp.Engine(chunk=chunk))
    sizes: list[int] = []

    def answer(start: int, size: int) -> torch.Tensor:
        assert start == sum(sizes)
        sizes.append(size)
        return torch.zeros(1)

    runner.in_chunks(count, answer, fixed=True)
    assert sum(sizes) == count
    shapes = [runner.shape(size) for size in sizes]
    assert set(shapes) <= {max(1, chunk // part) for part in (1, 4)}
    smallest = max(1, chunk // 4)
    assert all(
        size <= shape and (2 * size >= shape or shape == smallest) for size, shape in zip(sizes, shapes, strict=True)
    )


def test_a_fast_gap_that_was_further_off_than_tau_ends_the_run(masks):
    class FarOff:
        def __call__(self, images):
            fast = torch.is_autocast_enabled("cpu")
            return torch.tensor([[0.0, 0.05] if fast else [5.0, 0.0]]).expand(len(images), -1)

    table = TwoMaskTable(Runner(FarOff(), pp.Engine(precision="bf16", tau=0.1)), torch.zeros(1, 1, 9, 9), masks)
    with pytest.raises(pp.types.CheckError, match=r"changed by 5.05 between the fast precision and float32, more than"):
        table.evaluate_all()


def test_a_second_round_is_cancelled_once_a_label_differs(masks, generator):
    images = torch.rand(5, 1, 9, 9, generator=generator)

    def classifier(batch):
        return (batch.flatten(1) @ torch.arange(81 * 3).reshape(81, 3).float().remainder(7) - 120).remainder(3)

    first = torch.tensor([0, 1, 2, 3, 4])
    masks_of = torch.tensor([0, 4, 8, 2, 6])
    whole = TwoMaskTable(Runner(classifier, pp.Engine()), images, masks)
    expected = whole.labels_under(first, masks_of)
    lazy = TwoMaskTable(Runner(classifier, pp.Engine()), images, masks)
    until = expected[:, 0]
    found = lazy.labels_under(first, masks_of, until=until)
    assert torch.equal((found == until[:, None]).all(dim=1), (expected == until[:, None]).all(dim=1))
    assert int(lazy.forwards.sum()) < int(whole.forwards.sum())


def test_images_arrive_in_order_with_what_belongs_to_them_and_errors_after_them():
    def batches():
        yield "a", torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
        yield "b", torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
        raise OSError("disk")

    arrived = images_ahead(batches(), torch.device("cpu"))
    name, images = next(arrived)
    assert (name, images.dtype, images.unique().tolist()) == ("a", torch.float32, [1.0])
    assert next(arrived)[0] == "b"
    with pytest.raises(OSError, match="disk"):
        next(arrived)


def test_an_infinite_fast_lead_is_an_overflow_and_decided_again(masks):
    class Overflows:
        """In fast arithmetic label 0 wins by infinity; in float32 label 1 does."""

        def __call__(self, images):
            fast = torch.is_autocast_enabled("cpu")
            return torch.tensor([[torch.inf, 0.0] if fast else [0.0, 1.0]]).expand(len(images), -1)

    threat = pp.PatchThreat.square(image_size=(9, 9), pixels=2)
    engine = pp.Engine(precision="fp16", tau=0.1)
    defense = pp.PatchCleanser(Overflows(), masks, threat, engine=engine)
    images = torch.zeros(2, 1, 9, 9)
    assert defense.predict(images).tolist() == [1, 1]
    assert defense.certify(images, torch.tensor([0, 1])).certified.tolist() == [False, True]
    assert clean_labels(Runner(Overflows(), engine), images).tolist() == [1, 1]


def test_an_infinite_float32_lead_certifies_nothing(masks):
    threat = pp.PatchThreat.square(image_size=(9, 9), pixels=2)
    infinite = pp.PatchCleanser(lambda x: torch.tensor([[torch.inf, 0.0]]).expand(len(x), -1), masks, threat)
    assert not infinite.certify(torch.zeros(1, 1, 9, 9), torch.tensor([0])).certified.any()
