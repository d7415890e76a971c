"""Tests of `gradserve.torch` need PyTorch; without it they are skipped."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make install-frameworks")
