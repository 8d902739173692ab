"""The libraries transformers and timm, without the network; a stand-in for torchvision."""

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torchvision  # noqa: F401, of which both take operations on images
except RuntimeError:  # its compiled part does not load beside torch for the CPU alone
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm as timm
import transformers as transformers
