"""What a patch on a small image becomes at the network input, and what that costs in mask size."""

import patchproof as pp

for interpolation in ("nearest", "bilinear", "bicubic"):
    enlarge = pp.Preprocessing(resize=(224, 224), interpolation=interpolation)
    threat = pp.native_threat(native_size=(32, 32), patch_sizes=((5, 5),), preprocessing=enlarge)
    masks = pp.covering_masks(threat, per_axis=6)
    height, width = threat.patch_sizes[0]
    print(
        f"{interpolation:8}: 5×5 on 32×32 touches up to {height}×{width} of 224×224; masks of {masks.blocks[0].height}"
    )
