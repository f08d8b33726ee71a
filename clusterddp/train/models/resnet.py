"""ResNet-18 with torchvision's names and initial weights; for small images its first layers are those for CIFAR.

Above 64x64 pixels it is torchvision's own net (7x7 convolution with stride 2, then a max-pool): 11,689,512 parameters
with 3 channels and 1,000 classes. Else it begins with a 3x3 convolution: 11,173,962 with 3 channels and 10 classes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from clusterddp.train.models.convolution import Conv


def has_large_stem(side: int) -> bool:
    """Return whether images of `side` x `side` pixels are made a quarter as wide before the first block."""
    return side > 64


class ResNet18(nn.Module):
    """The residual net of He et al. (2015) with eight basic blocks; fresh weights from torch's global random state.

    The parameters' names are torchvision's, so that its tools and checkpoints of its `resnet18` apply (without
    `large_stem` the stem's shape differs).
    """

    def __init__(self, *, channels: int = 3, num_classes: int = 10, large_stem: bool = False) -> None:
        super().__init__()
        self.large_stem = large_stem
        self.conv1 = Conv(channels, 64, 7, stride=2) if large_stem else Conv(channels, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _layer(64, 64, stride=1)
        self.layer2 = _layer(64, 128, stride=2)
        self.layer3 = _layer(128, 256, stride=2)
        self.layer4 = _layer(256, 512, stride=2)
        self.fc = nn.Linear(512, num_classes)
        # torchvision's initial weights (0.28.0, models/resnet.py): He normal (fan out) for convolutions, ones and zeros
        # for batch norm; like there, the linear layer keeps torch's own.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [batch, class] of normalised images [batch, channel, height, width]."""
        x = functional.relu(self.bn1(self.conv1(images)), inplace=True)
        if self.large_stem:
            x = functional.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a short cut around them."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels_in, channels_out, stride=stride)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = Conv(channels_out, channels_out)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.downsample = (
            None
            if stride == 1 and channels_in == channels_out
            else nn.Sequential(Conv(channels_in, channels_out, 1, stride=stride), nn.BatchNorm2d(channels_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, channels_in, h, w] to [batch, channels_out, h / stride, w / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.relu(self.bn2(self.conv2(y)).add_(shortcut), inplace=True)


def _layer(channels_in: int, channels_out: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(channels_in, channels_out, stride), BasicBlock(channels_out, channels_out, 1))
