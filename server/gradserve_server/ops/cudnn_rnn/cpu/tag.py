"""The tag of a reserve space in host memory."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.ops.cudnn_rnn.reserve import TAG_BYTES

_PIECE_BYTES = 1 << 26
_AES_KEY_BYTES = 32
_NONCE_BYTES = 12


def content_tag(key: bytes, content: NDArray[np.uint8]) -> bytes:
    """Returns the tag of a content, which is contiguous.

    It is a hash of the tags of AES-GCM (GMAC, NIST SP 800-38D) for each piece of the content. Processors have
    instructions for that, so it takes a tenth of the time of a cryptographic hash, and other threads run meanwhile.

    Args:
        key: 64 bytes, which authenticate one content only.
        content: The bytes to authenticate.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # few servers need it, and it takes a while

    cipher = AESGCM(key[:_AES_KEY_BYTES])
    tags = hashlib.blake2b(key=key[_AES_KEY_BYTES:], digest_size=TAG_BYTES)
    for number, start in enumerate(range(0, len(content), _PIECE_BYTES)):
        checkpoint()
        piece: Any = content[start : start + _PIECE_BYTES]  # whose type does not say that it is a buffer
        tags.update(cipher.encrypt(number.to_bytes(_NONCE_BYTES, "little"), b"", piece))
    return tags.digest()
