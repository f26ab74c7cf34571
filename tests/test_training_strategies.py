"""Every strategy against a plain-Python reference, its cost, and that it changes no state."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchproof as pp
import reference
from patchproof.masking import evaluating, show
from patchproof.models import load_classifier
from patchproof.training import STRATEGIES, masking_strategy, training_masks
from patchproof.training.gradcam import grad_cam
from patchproof.training.strategies import checked
from patchproof.types import InputError

SEARCHES = ("greedy3x3", "greedy6x6", "greedy", "grid3x3")


def build(name, size, *, seed=0, masks=None, chunk=64):
    generator = torch.Generator().manual_seed(seed)
    return masking_strategy(name, image_size=size, generator=generator, masks=masks, engine=pp.Engine(batch_size=chunk))


def expected_copies(name, loss, coarse, fine):
    if name == "greedy":
        return list(reference.multi_size_greedy(loss, coarse, fine))
    chosen = coarse if name.endswith("3x3") else fine
    return [(reference.grid if name.startswith("grid") else reference.greedy)(loss, chosen)]


def assert_equals_reference(name, size, masks, seed, *, flat=False):
    generator = torch.Generator().manual_seed(seed)
    classifier = (reference.ExactClassifier, reference.ExactMasking)[seed % 2](size, 3, generator)
    if flat:  # few distinct losses, so ties are the rule
        classifier.weight = classifier.weight.clamp(0, 1) * (
            torch.rand(classifier.weight.shape, generator=generator) < 0.05
        )
    images = torch.randint(0, 5, (3, 2, *size), generator=generator) / 4
    labels = torch.randint(0, 3, (3,), generator=generator)
    found = build(name, size, masks=masks, chunk=7)(classifier, images, labels)
    for row, label in enumerate(labels.tolist()):

        def loss(rects, row=row, label=label):
            return reference.cross_entropy(reference.logits_under(classifier, images[row], rects), label)

        for index, rects in enumerate(expected_copies(name, loss, *masks)):
            assert torch.equal(found[index, row], reference.hide(torch.ones(1, *size), rects, [0.0]) > 0)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32), st.sampled_from(SEARCHES), st.booleans(), st.sampled_from([None, (14, 2), (17, 3), (13, 5)])
)
def test_the_masks_are_exactly_those_of_the_reference_ties_included(seed, name, flat, side_and_patch):
    """With the masks of the paper's patch, and with other pairs of sets."""
    size, masks = (16, 16), training_masks((16, 16))
    if side_and_patch is not None:
        size = side_and_patch[0], side_and_patch[0] + 3
        threat = pp.PatchThreat.square(image_size=size, pixels=side_and_patch[1])
        masks = pp.covering_masks(threat, per_axis=3), pp.covering_masks(threat, per_axis=6)
    assert_equals_reference(name, size, masks, seed, flat=flat)


TABLE = {
    "none": (1, 0, 0), "cutout": (1, 0, 0), "rand3x3": (1, 0, 0), "rand6x6": (1, 0, 0), "rand": (2, 0, 0),
    "column4": (1, 0, 0), "row4": (1, 0, 0), "block12": (1, 0, 0),
    "gutout3x3": (1, 2, 2), "gutout6x6": (1, 2, 2), "gutout": (2, 4, 4), "greedy3x3": (1, 17, 0),
    "greedy6x6": (1, 71, 0), "greedy": (2, 25, 0), "grid3x3": (1, 45, 0), "grid6x6": (1, 666, 0),
}  # fmt: skip
"""The paper's table: copies, forward and backward passes per image."""


class Counting(nn.Module):
    """A small network that counts the images it is shown."""

    fill = (0.5, 0.5, 0.5)

    def __init__(self, size=8):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Conv2d(3, size, 3, stride=2), nn.BatchNorm2d(size), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )
        self.head = nn.Linear(size, 4)
        self.forwards = 0

    def forward(self, images):
        self.forwards += len(images)
        return self.head(self.body(images).mean(dim=(2, 3)))


@pytest.mark.parametrize("name", TABLE)
def test_copies_and_passes_equal_the_papers_table_and_no_state_changes(name):
    assert set(TABLE) == set(STRATEGIES) - {"memory"}
    copies, forwards, backwards = TABLE[name]
    classifier = Counting().train()
    classifier.body[1].eval()  # a mixed mode must come back as it was
    images, labels = torch.rand(2, 3, 28, 28), torch.tensor([0, 3])
    with evaluating(classifier):
        grad_cam(classifier, images[:1], labels[:1])  # finding the layer once is not part of the cost
    before, modes = copy.deepcopy(classifier.state_dict()), [m.training for m in classifier.modules()]
    classifier.forwards, state = 0, torch.get_rng_state()
    strategy = build(name, (28, 28))
    keep = strategy(classifier, images, labels)
    assert keep.shape == (copies, 2, 1, 28, 28)
    assert keep.dtype == torch.bool
    assert classifier.forwards == forwards * len(images)
    assert (strategy.forwards, strategy.backwards) == (forwards, backwards)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in classifier.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in classifier.state_dict().items())
    assert all(p.grad is None for p in classifier.parameters())
    assert not any(m._forward_hooks for m in classifier.modules())


@pytest.mark.parametrize("name", ["cutout", "rand"])
def test_random_strategies_depend_on_the_generator_alone(name):
    images, labels = torch.rand(8, 3, 28, 28), torch.zeros(8, dtype=torch.int64)
    torch.manual_seed(1)
    first = build(name, (28, 28), seed=5)(lambda x: x, images, labels)
    torch.manual_seed(2)
    second = build(name, (28, 28), seed=5)(lambda x: x, torch.zeros_like(images), labels)
    other = build(name, (28, 28), seed=6)(lambda x: x, images, labels)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_random_masks_are_uniform_pairs():
    coarse, _ = training_masks((28, 28))
    strategy = build("rand3x3", (28, 28))
    found = strategy(lambda x: x, torch.zeros(20_000, 1, 28, 28), torch.zeros(20_000, dtype=torch.int64))[0]
    keep = coarse.keep()
    pairs = {
        (a, b): (found == keep[a] & keep[b]).all(dim=(1, 2, 3)).float().mean().item()
        for a in range(9)
        for b in range(a, 9)
    }
    assert sum(pairs.values()) == pytest.approx(1)
    for (a, b), share in pairs.items():
        assert share == pytest.approx((1 if a == b else 2) / 81, abs=0.004)


def test_cutout_hides_two_squares_whose_centres_are_uniform_and_may_leave_the_image():
    images = torch.zeros(1, 1, 1, 1).expand(400, 1, 224, 224)
    keep = build("cutout", (224, 224))(lambda x: x, images, torch.zeros(400, dtype=torch.int64))[0, :, 0]
    assert (~keep).any(dim=1).sum(dim=1).max() <= 2 * 128
    assert (~keep).sum(dim=(1, 2)).max() <= 2 * 128**2
    assert (~keep).sum(dim=(1, 2)).min() >= 64 * 64  # a corner square keeps a quarter inside
    # A pixel at distance d from the rim is hidden by one square with probability (reach_row/224)·(reach_column/224).
    middle, corner = (~keep[:, 112, 112]).float().mean(), (~keep[:, 0, 0]).float().mean()
    assert middle.item() == pytest.approx(1 - (1 - (128 / 224) ** 2) ** 2, abs=0.08)
    assert corner.item() == pytest.approx(1 - (1 - (65 / 224) ** 2) ** 2, abs=0.06)


def test_the_paper_sizes_at_224_and_28():
    assert [m.rects[0].height for m in training_masks((224, 224))] == [100, 69]
    assert [m.rects[0].height for m in training_masks((28, 28))] == [12, 8]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"target": "label"}, {"layer": "body.0", "upsampling": "nearest"}, {"upsampling": "bicubic"}]
)
def test_gutout_hides_the_most_salient_place_and_then_again(number, options, generator):
    """By default, for the class predicted for what is still visible."""
    classifier, masks = Counting().eval(), training_masks((28, 28))[number]
    images, labels = torch.rand(6, 3, 28, 28, generator=generator), torch.arange(6) % 4
    name = ("gutout3x3", "gutout6x6")[number]
    strategy = masking_strategy(name, image_size=(28, 28), generator=generator, **options)
    (keep,) = strategy(classifier, images, labels)
    layer = classifier.body[0] if "layer" in options else None
    for image, label, kept in zip(images, labels, keep, strict=True):
        visible = torch.ones(28, 28, dtype=torch.bool)
        for _ in range(2):
            seen = torch.where(visible, image, 0.5)
            aim = label[None] if options.get("target") == "label" else classifier(seen[None]).argmax(dim=1)
            how = {"layer": layer, "upsampling": options.get("upsampling", "bilinear")}
            salience = grad_cam(classifier, seen[None], aim, **how)[0]
            parts = [(slice(r.top, r.top + r.height), slice(r.left, r.left + r.width)) for r in masks.rects]
            visible[max(parts, key=lambda part: float(salience[part].sum()))] = False
        assert torch.equal(kept[0], visible)


@settings(max_examples=6)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(2, 2, 2, 2), (2, 2, 2, 1), (1, 1, 1, 1), (3, 4, 2, 2), (9, 4, 9, 4)]),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_memory_equals_the_reference_over_epochs_of_changing_weights(seed, tries, refresh, odd):
    """Images come in any order and batch, some first in a later epoch; with odd masks some have fewer children."""
    generator = torch.Generator().manual_seed(seed)
    size = (13, 16) if odd else (16, 16)
    threat = pp.PatchThreat.square(image_size=size, pixels=5 if odd else 3)
    masks = pp.covering_masks(threat, per_axis=3), pp.covering_masks(threat, per_axis=6)
    strategy = masking_strategy(
        "memory", image_size=size, generator=generator, masks=masks, engine=pp.Engine(batch_size=7),
        tries=tries, refresh=refresh,
    )  # fmt: skip
    expected = reference.Remembering(*masks, tries=tries, refresh=refresh)
    images = torch.randint(0, 5, (5, 2, *size), generator=generator) / 4
    labels = torch.randint(0, 3, (5,), generator=generator)
    for epoch in range(3):
        classifier = reference.ExactClassifier(size, 3, generator)
        for rows in torch.randperm(5 if epoch else 4, generator=generator).split(3):
            classifier.calls, passes = 0, 0
            keep = strategy(classifier, images[rows], labels[rows], indices=2 * rows, epoch=epoch)
            counted = classifier.calls
            for place, row in enumerate(rows.tolist()):

                def loss(rects, row=row, classifier=classifier):
                    return reference.cross_entropy(
                        reference.logits_under(classifier, images[row], rects), int(labels[row])
                    )

                copies, spent = expected.search(row, loss, epoch)
                passes += spent
                for index, rects in enumerate(copies):
                    assert torch.equal(keep[index, place], reference.hide(torch.ones(1, *size), rects, [0.0]) > 0)
                assert spent <= strategy.forwards or spent == expected.full_passes
            assert counted == passes
            told = torch.rand(2, len(rows), generator=generator)
            strategy.observe(told, indices=2 * rows)
            expected.observe(rows.tolist(), told[1].tolist())
    assert build("memory", (28, 28)).forwards == 8


def test_memory_of_an_image_applies_to_its_mirror_image(generator):
    """A mirrored network on mirrored images tries the mirror images of the masks remembered as worst."""
    images, labels = torch.rand(5, 2, 28, 28, generator=generator), torch.arange(5) % 3
    before, now, turned = (reference.Curved((28, 28), 3, generator) for _ in range(3))
    for network in (before, now):
        network.inner *= 0.05  # far from saturation, so that no two losses are equal
    turned.inner, turned.outer = now.inner.flip(3), now.outer
    every, chosen = torch.arange(5), []
    for mirrored in (False, True):
        strategy = masking_strategy("memory", image_size=(28, 28), generator=generator, tries=(2, 4, 2, 4))
        strategy(before, images, labels, indices=every)
        strategy.mirrored = torch.full((5,), mirrored)
        shown, network = (images.flip(3), turned) if mirrored else (images, now)
        keep = strategy(network, shown, labels, indices=every)
        chosen.append(keep.flip(4) if mirrored else keep)
    assert torch.equal(*chosen)
    fresh = masking_strategy("memory", image_size=(28, 28), generator=generator, tries=(2, 4, 2, 4))
    assert not torch.equal(fresh(now, images, labels, indices=every), chosen[0]), "the memory matters"


def test_images_without_indices_are_searched_and_not_remembered(generator):
    images, labels = torch.rand(5, 2, 28, 28, generator=generator), torch.arange(5) % 3
    network, indices = reference.Curved((28, 28), 3, generator), torch.arange(5)
    memory = masking_strategy("memory", image_size=(28, 28), generator=generator, tries=(2, 2, 2, 1))
    for _ in range(2):
        memory(network, images, labels, indices=indices)
    before = memory.table.nan_to_num(-1)
    assert torch.equal(memory(network, images, labels), build("greedy", (28, 28))(network, images, labels))
    memory.observe(torch.rand(2, 5), indices=indices)
    assert torch.equal(memory.table.nan_to_num(-1), before)


@pytest.mark.slow
def test_a_hole_aimed_at_the_label_reveals_it_and_one_aimed_at_the_prediction_does_not():
    """A network trained on holes that hide the evidence for the true label predicts *better* with such a hole than
    without, because the position of the hole reveals the label."""
    train, test = (pp.open_dataset("fashion-mini", split=split) for split in ("train", "test"))
    images = torch.from_numpy(test.pixels)[:, None].expand(-1, 3, -1, -1) / 255
    labels = torch.tensor(test.labels)
    gain = {}
    for target in ("label", "predicted"):
        start = load_classifier("small", "random", class_names=train.class_names, seed=0)
        plan = pp.Plan(
            strategy="gutout6x6", gutout_target=target, epochs=4, batch_size=48, learning_rate=0.1, schedule="cosine"
        )
        classifier = pp.train(start, train, plan, limit=2000).classifier
        aimed = masking_strategy("gutout6x6", image_size=(28, 28), generator=torch.Generator(), target="label")
        with torch.no_grad():
            clean, holed = classifier(images), show(classifier, images, aimed(classifier, images, labels)[0])
        gain[target] = float(((holed.argmax(1) == labels).float() - (clean.argmax(1) == labels).float()).mean())
    assert gain["label"] > 0.02
    assert gain["label"] > gain["predicted"] + 0.03


@pytest.mark.parametrize("name", ["greedy", "cutout"])
def test_labels_out_of_range_and_images_of_another_size_are_refused(name):
    classifier = load_classifier("small", "random", num_classes=4)
    strategy = build(name, (28, 28))
    with pytest.raises(InputError, match="labels run from 0 to 4, but the classifier has the outputs 0 to 3"):
        strategy(classifier, torch.rand(2, 3, 28, 28), torch.tensor([0, 4]))
    with pytest.raises(InputError, match=r"height and width \(28, 28\), not \(2, 3, 20, 28\)"):
        strategy(classifier, torch.rand(2, 3, 20, 28), torch.tensor([0, 1]))


def test_memory_says_what_it_saves_over_epochs():
    for refresh, full in ((0, 1), (4, 3)):  # the first epoch; epochs 0, 4 and 8
        memory = masking_strategy("memory", image_size=(28, 28), generator=torch.Generator(), refresh=refresh)
        assert memory.saved(10) == pytest.approx((10 - full) / 10 * 17 / 25)


def test_wrong_masks_and_options_are_refused():
    for options, words in (
        ({"tries": (2, 2, 0, 2)}, r"tries must be at least 1 in each round, not \(2, 2, 0, 2\)"),
        ({"refresh": -1}, "refresh must be 0"),
        ({"trys": 2}, "`memory` has no option `trys`; it has tries, refresh"),
    ):
        with pytest.raises(InputError, match=words):
            masking_strategy("memory", image_size=(28, 28), generator=torch.Generator(), **options)
    gutout = masking_strategy("gutout", image_size=(28, 28), generator=torch.Generator(), layer="boddy.0")
    with pytest.raises(InputError, match=r"the network has no layer `boddy.0`; e.g. `body.0`"):
        gutout(Counting(), torch.zeros(1, 3, 28, 28), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match="gutout_target must be"):
        pp.Plan(gutout_target="truth")
    for wrong in ("0", "2,2", "two"):
        with pytest.raises(InputError, match="memory_tries must be one positive number or four"):
            pp.Plan(memory_tries=wrong)
    with pytest.raises(InputError, match=r"not \(32, 32\)"):
        build("greedy", (32, 32), masks=training_masks((28, 28)))
    coarse, fine = training_masks((28, 28))
    with pytest.raises(InputError, match=r"no set of the finer masks' intervals .* covers"):
        build("greedy", (28, 28), masks=(coarse, pp.MaskSet((28, 28), (fine.rects[0],))))
    with pytest.raises(InputError, match=r"must be an nn\.Module"):
        build("gutout", (28, 28))(
            lambda x: x.mean((2, 3)), torch.zeros(1, 3, 28, 28), torch.zeros(1, dtype=torch.int64)
        )


@pytest.mark.parametrize("name", ["greedy", "grid3x3"])
def test_the_chunk_that_memory_allowed_is_kept_from_batch_to_batch(name, generator):
    sizes: list[int] = []

    def crowded(images):
        sizes.append(len(images))
        if len(images) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return images.flatten(1)[:, :3]

    images, labels = torch.rand(4, 3, 28, 28, generator=generator), torch.tensor([0, 1, 2, 0])
    strategy = build(name, (28, 28), chunk=64)
    strategy(crowded, images, labels)
    assert max(sizes) > 5
    sizes.clear()
    strategy(crowded, images, labels)
    assert max(sizes) == 4


def test_masks_of_a_users_strategy_are_checked():
    images = torch.rand(2, 3, 28, 28)
    assert checked(torch.ones(3, 2, 1, 28, 28, dtype=torch.bool), images).shape[0] == 3
    for wrong in (
        torch.ones(3, 2, 1, 28, 28),
        torch.ones(0, 2, 1, 28, 28) > 0,
        torch.ones(2, 1, 28, 28) > 0,
        torch.ones(3, 1, 1, 28, 28) > 0,
        [True],
    ):
        with pytest.raises(InputError, match=r"must return booleans of shape \(copies ≥ 1, 2, 1, h, w\), not"):
            checked(wrong, images)
