"""Dropped tokens: the answers of a transformer whose attention is masked, for the cost of what is visible."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import patchproof as pp
from patchproof.cli import run
from patchproof.masking import masks_for
from patchproof.models import (
    ImageClassifier,
    _build,
    _tokens,
    checkpoint_sha256,
    load_checkpoint,
    load_classifier,
    rewrap,
    save_checkpoint,
    weights_sha256,
)
from patchproof.types import InputError

TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
HEADS = {
    "class token": {},
    "class token, registers": {"reg_tokens": 3, "no_embed_class": True},
    "mean, no class token": {"global_pool": "avg", "class_token": False},
    "mean beside a class token": {"global_pool": "avg", "fc_norm": True, "pre_norm": True},
    "mean of all": {"global_pool": "avg", "pool_include_prefix": True, "dynamic_img_size": True},
}


def transformer(**options) -> ImageClassifier:
    built = _build.build_timm("vit_tiny_patch16_224", num_classes=3, model_args=TINY | options).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in built.parameters():  # far from the even answers of fresh weights
        nn.init.normal_(parameter, std=0.15, generator=generator)
    return rewrap(built, drop_tokens=True)


class AttentionMasked(nn.Module):
    """The same network on all tokens, none of which attends to a hidden one, and a pool that leaves these out."""

    def __init__(self, classifier: ImageClassifier):
        super().__init__()
        self.classifier, self.fill, self.num_classes = classifier, classifier.fill, classifier.num_classes
        self.token_size = classifier.token_size

    def forward(self, images):
        return self.classifier(images)

    def masked(self, images, keep):
        vit = self.classifier.module
        tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(self.classifier.prepared(images))))
        height, width = vit.patch_embed.patch_size
        grid = keep.unflatten(2, (-1, height)).unflatten(4, (-1, width)).any(dim=5).any(dim=3).flatten(1)
        seen = torch.cat([torch.ones(len(images), tokens.shape[1] - grid.shape[1], dtype=torch.bool), grid], dim=1)
        for block in vit.blocks:
            tokens = block(tokens, attn_mask=seen[:, None, None].expand(-1, 1, seen.shape[1], -1))
        tokens = vit.norm(tokens)
        if vit.global_pool == "token":
            return vit.head(vit.fc_norm(tokens[:, 0]))
        first = 0 if vit.pool_include_prefix else vit.num_prefix_tokens
        weights = seen[:, first:].float() / seen[:, first:].sum(dim=1, keepdim=True)
        return vit.head(vit.fc_norm(torch.einsum("bt,btd->bd", weights, tokens[:, first:])))


def views(generator) -> torch.Tensor:
    """One mask, two masks aligned to tokens or not, a column band, and everything."""
    threat = pp.PatchThreat.square(image_size=(32, 32), pixels=6)
    aligned = pp.covering_masks(threat, per_axis=3, align=(4, 4)).keep()
    uneven = pp.covering_masks(threat, per_axis=3).keep()
    band = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    band[..., 9:14] = True
    first, second = torch.randint(9, (2, 12), generator=generator)
    return torch.cat([aligned, aligned[first] & aligned[second], uneven[first] & uneven[second], band, ~(band & ~band)])


@pytest.mark.parametrize("least", [1, 5, 100])
@pytest.mark.parametrize("head", HEADS)
def test_logits_and_gradients_are_those_of_masked_attention(head, least, generator, monkeypatch):
    """In groups of any size: each length alone, some joined, or all of them."""
    monkeypatch.setattr(_tokens, "SMALLEST_GROUP", least)
    classifier, keep = transformer(**HEADS[head]), views(generator)
    images = torch.where(keep, torch.rand(len(keep), 3, 32, 32, generator=generator), classifier.mean[:, None, None])
    slopes = []
    for network in (classifier, AttentionMasked(classifier)):
        logits = network.masked(images, keep)
        slopes.append((logits, *torch.autograd.grad(logits.square().sum(), list(classifier.parameters()))))
    for found, expected in zip(*slopes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert slopes[0][0].std() > 0.1
    torch.testing.assert_close(logits[-1:], classifier(images[-1:]), rtol=1e-4, atol=1e-4)


def test_each_copy_costs_its_visible_tokens_and_a_hidden_image_has_an_answer(generator, monkeypatch):
    monkeypatch.setattr(_tokens, "SMALLEST_GROUP", 1)
    classifier, keep = transformer(global_pool="avg", class_token=False), views(generator)
    used = []
    classifier.module.blocks[0].register_forward_hook(lambda _, inputs, __: used.append(inputs[0].shape[:2].numel()))
    classifier.masked(torch.rand(len(keep), 3, 32, 32, generator=generator), keep)
    assert sum(used) == sum(int(nn.functional.max_pool2d(k.float(), 4).sum()) for k in keep)
    nothing = torch.zeros(2, 1, 32, 32, dtype=torch.bool)
    answers = classifier.masked(torch.full((2, 3, 32, 32), 0.5), nothing)
    assert answers.isfinite().all()
    torch.testing.assert_close(answers[0], answers[1])  # a matrix product may round its rows differently


@pytest.mark.parametrize("defense", ["patchcleanser", "alarm"])
def test_verdicts_and_answers_are_those_of_masked_attention(defense, generator):
    classifier = transformer()
    threat = pp.PatchThreat.square(image_size=(32, 32), pixels=6)
    images = torch.rand(24, 3, 4, 4, generator=generator).repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    with torch.no_grad():
        classifier.module.head.bias -= classifier(images).mean(dim=0)  # all labels are answered
    ours, theirs = (
        pp.defense(defense, network, threat, per_axis=3) for network in (classifier, AttentionMasked(classifier).eval())
    )
    assert all(r.top % 4 == r.left % 4 == r.height % 4 == r.width % 4 == 0 for r in ours.masks.rects)
    labels = ours.predict(images)
    assert torch.equal(labels, theirs.predict(images))
    found, expected = (d.certify(images, labels.clamp(min=0)) for d in (ours, theirs))
    assert torch.equal(found.certified, expected.certified)
    assert 0 < int(found.certified.sum()) < len(images)


def test_a_copy_in_another_float_type_drops_the_same_tokens(generator):
    classifier, keep = transformer(), views(generator)
    images = torch.rand(len(keep), 3, 32, 32, generator=generator)
    lowered = classifier.lowered(torch.bfloat16)
    expected = classifier.masked(images, keep)
    assert (lowered.masked(images, keep).float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.slow
def test_compiled_passes_answer_the_same(generator, monkeypatch):
    classifier, keep = transformer(), views(generator)
    images = torch.rand(len(keep), 3, 32, 32, generator=generator)
    monkeypatch.setattr(_tokens, "SMALLEST_GROUP", 4)  # some joined, some not
    with torch.no_grad():
        compiled = classifier.lowered(torch.float32, compiled=True)
        expected = classifier.masked(images, keep)
        torch.testing.assert_close(compiled.masked(images, keep), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_remembers_it_and_it_is_part_of_the_identity(tmp_path):
    classifier = transformer()
    save_checkpoint(classifier, tmp_path / "vit")
    loaded = load_checkpoint(tmp_path / "vit")
    assert loaded.token_size == (4, 4)
    assert weights_sha256(loaded) == weights_sha256(classifier) == checkpoint_sha256(tmp_path / "vit")
    assert weights_sha256(classifier) != weights_sha256(rewrap(classifier, drop_tokens=False))
    small = load_classifier("small", "random", num_classes=3, input_size=(32, 32))
    assert pp.Ensemble([loaded, small]).token_size == (4, 4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("resnet10t", "not ResNet"),
        ("deit_tiny_distilled_patch16_224", "not VisionTransformerDistilled with PatchEmbed"),
        ("vit_tiny_r_s16_p8_224", "not VisionTransformer with HybridEmbed"),
    ],
)
def test_other_networks_are_refused_by_name(model, words):
    with pytest.raises(InputError, match=f"drop_tokens needs one of timm's plain vision transformers.*{words}"):
        load_classifier(model, "random", num_classes=3, drop_tokens=True)


def test_training_certification_and_prediction_from_the_command_line(tmp_path, capsys):
    save_checkpoint(rewrap(transformer(), drop_tokens=False), tmp_path / "start")
    train = ["train", "--weights", str(tmp_path / "start"), "--drop-tokens", "--limit", "4", "--epochs", "1"]
    train += ["--batch-size", "4", "--validation-images", "2", "--strategy", "rand"]
    assert run([*train, "--output", str(tmp_path / "t")]) == 0
    weights, certified = str(tmp_path / "t" / "checkpoint-last"), str(tmp_path / "c")
    assert run(["certify", "--weights", weights, "--limit", "4", "--output", certified]) == 0
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["model"]["drop_tokens"] is True
    assert manifest["identity"]["defense"]["masks"].startswith("3x3 masks, rows 0-16 8-24 16-32,")
    bench = ["bench", "--weights", weights, "--limit", "2", "--peer-images", "1", "--seconds", "0.05"]
    assert run([*bench, "--output", str(tmp_path / "bench.json")]) == 0
    rows = {row["name"]: row["passes"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert rows["ours, all tokens"] == rows["ours, every pair"] == 2 * 45
    picture = tmp_path / "x.png"
    pp.open_dataset("fashion-mini").load(0).save(picture)
    assert run(["predict", str(picture), "--weights", weights, "--like", certified]) == 0
    plain = tmp_path / "plain"
    save_checkpoint(rewrap(load_checkpoint(tmp_path / "t" / "checkpoint-last"), drop_tokens=False), plain)
    assert run(["predict", str(picture), "--weights", str(plain), "--like", certified]) == 1
    assert "not known to be those that" in capsys.readouterr().err


def test_masks_for_a_classifier_without_tokens_are_the_plain_ones():
    threat = pp.PatchThreat.square(image_size=(28, 28), percent=3)
    assert masks_for(lambda x: x, threat, per_axis=3) == pp.covering_masks(threat, per_axis=3)
