"""A vision model of timm, with its loss, its optimizer and an average of the weights."""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # Its wheel is linked against CUDA: beside a CPU build of torch two ops have to be declared.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

torch.manual_seed(0)
model = timm.create_model("convnext_atto", pretrained=False, num_classes=10, drop_path_rate=0.1)
average = ModelEmaV3(model, decay=0.9)
optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)
criterion = LabelSmoothingCrossEntropy(0.1)
generator = torch.Generator().manual_seed(0)

model.train()
for _ in range(8):
    images = torch.randn(8, 3, 128, 128, generator=generator)
    labels = torch.randint(0, 10, (8,), generator=generator)
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)
    print("loss", loss.item().hex(), flush=True)
print("weights", sum(p.detach().double().sum() for p in average.module.parameters()).item().hex())
