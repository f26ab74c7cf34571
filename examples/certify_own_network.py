"""Certify a network of your own on images of your own: any nn.Module, any sequence of (image, label)."""

import torch
from torch import nn

import patchproof as pp

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
).eval()
images = (torch.rand(32, 3, 1, 1) + torch.rand(32, 3, 64, 64)) / 2  # in [0, 1]; PIL images of any size do as well
data = list(zip(images, network(images).argmax(dim=1), strict=True))

threat = pp.PatchThreat.square(image_size=(64, 64), percent=2)  # one square patch of 2% of the pixels, anywhere
defense = pp.defense("patchcleanser", network, threat, per_axis=3)
results = pp.certify(defense, data, folder="runs/own-in-python", resume=True)  # a run that was stopped goes on here

certified = results.certified
print(f"{certified.k} of {certified.n} images keep their label under any patch of {threat.patch_sizes[0]} pixels")
print("certified, 95% interval: {:.1%} to {:.1%}".format(*certified.interval))
for record in [record for record in results.records if not record.certified][:3]:
    first, second = (defense.masks.rects[number] for number in record.evidence["witness"]["masks"])
    print(f"image {record.index} becomes {record.evidence['witness']['label']} under {first} and {second}")
