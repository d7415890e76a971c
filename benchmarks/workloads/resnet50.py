"""The trainable tensors of a ResNet-50: 161 of them, 25.6 million parameters, 102 MB as float32.

Standard library only: the peers import it inside their own environments.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLOCKS = (3, 4, 6, 3)
"""The bottleneck blocks in each of the four stages."""
_EXPANSION = 4
"""A block's output has this many times the channels of its 3x3 convolution."""


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every trainable tensor, in the order of the layers."""
    return dict(_parameters())


def _parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _convolution("conv1", "bn1", inputs=3, outputs=64, kernel=7)
    channels = 64
    for stage, blocks in enumerate(_BLOCKS):
        width = 64 * 2**stage
        for block in range(blocks):
            prefix = f"layer{stage + 1}.{block}."
            yield from _convolution(f"{prefix}conv1", f"{prefix}bn1", inputs=channels, outputs=width, kernel=1)
            yield from _convolution(f"{prefix}conv2", f"{prefix}bn2", inputs=width, outputs=width, kernel=3)
            outputs = width * _EXPANSION
            yield from _convolution(f"{prefix}conv3", f"{prefix}bn3", inputs=width, outputs=outputs, kernel=1)
            if block == 0:
                shortcut = f"{prefix}downsample."
                yield from _convolution(f"{shortcut}0", f"{shortcut}1", inputs=channels, outputs=outputs, kernel=1)
            channels = outputs
    yield "fc.weight", (1000, channels)
    yield "fc.bias", (1000,)


def _convolution(
    name: str, norm: str, *, inputs: int, outputs: int, kernel: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors of a convolution without bias, and of the batch normalization after it."""
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield f"{norm}.weight", (outputs,)
    yield f"{norm}.bias", (outputs,)
