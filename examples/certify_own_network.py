"""Certify a network of your own in a dozen lines: any nn.Module, any images in [0, 1]."""

import torch
from torch import nn

import patchproof as pp

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
).eval()
images = torch.rand(16, 3, 64, 64)

threat = pp.PatchThreat.square(image_size=(64, 64), percent=2)  # one square patch of 2% of the pixels, anywhere
masks = pp.covering_masks(threat, per_axis=3)  # masks that hide every position of it
engine, _ = pp.check_classifier(network, images, masks, num_classes=10)  # does it answer one image one way?
defense = pp.PatchCleanser(network, masks, threat, engine=engine)

labels = defense.predict(images)
found = defense.certify(images, labels)
print(f"{int(found.certified.sum())} of {len(images)} answers cannot be changed by any {threat.patch_sizes[0]} patch")
print(f"{found.forwards.float().mean():.1f} forward passes an image, {len(masks.unions)} without early exit")
for row in (~found.certified).nonzero()[:3, 0].tolist():
    first, second = (masks.rects[i] for i in found.witness[row].tolist())
    print(f"image {row}: label {int(labels[row])} becomes {int(found.witness_label[row])} under {first} and {second}")
