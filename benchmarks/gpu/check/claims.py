"""Claims about numbers, memory and threads that only a GPU can settle, and the tests that settle them."""

from __future__ import annotations

from dataclasses import dataclass

_RNN = "tests/ops/cudnn_rnn/cuda/test_gpu.py::"
_DEVICE = "tests/devices/cuda/test_gpu.py::"
_SETTLED = "tests/devices/cuda/test_settled_by_a_gpu.py::"

MOST_TESTS = 16
"""The most tests that judge a claim; the last part of the check runs all."""


@dataclass(frozen=True)
class Claim:
    """A claim, and the tests that judge it.

    Attributes:
        text: The claim.
        tests: The beginnings of the ids of tests.
        words: What the ids have, too.
    """

    text: str
    tests: tuple[str, ...]
    words: tuple[str, ...] = ()

    def has(self, test: str) -> bool:
        """Returns True if the test with this id judges the claim."""
        return test.startswith(self.tests) and all(word in test for word in self.words)


CLAIMS = (
    Claim("products of float32 are not rounded to fewer bits", (_DEVICE + "test_products_of_float32_keep_all_bits",)),
    Claim(
        "products of float32 are near those of float64 at K = 4096, whatever CUPY_TF32 says",
        (_SETTLED + "test_products_beside_float64",),
    ),
    Claim(
        "cuDNN writes nothing but zeros beyond the end of short sequences",
        (_RNN + "test_what_cudnn_writes_beyond_the_end_of_a_sequence",),
    ),
    Claim(
        "what lies beyond the end of a sequence, in inputs and in dy, is not read",
        (_RNN + "test_what_lies_beyond_the_end_of_a_sequence_is_not_read",),
    ),
    Claim("biases count once with skip_input", (_RNN + "test_reference",), ("skip",)),
    Claim("bidirectional networks with lengths", (_RNN + "test_reference",), ("bidirectional", "-lengths")),
    Claim("parameters lie in the order of the canonical vector", (_RNN + "test_where_parameters_are",)),
    Claim("dropout follows the seed", (_RNN + "test_dropout_follows_the_seed",)),
    Claim("dropout is the same in every thread", (_SETTLED + "test_dropout_is_the_same_in_every_thread",)),
    Claim(
        "a reserve space that was changed is refused",
        (_RNN + "test_a_reserve_space_that_was_changed", _SETTLED + "test_tags_of_reserve_spaces"),
    ),
    Claim("kernels compiled in advance are those that run", (_SETTLED + "test_kernels_compiled_in_advance",)),
    Claim("a gradient is that of what was dropped", (_RNN + "test_the_gradient_is_that_of_what_was_dropped",)),
    Claim(
        "results are the same to the bit every time",
        (
            _DEVICE + "test_results_are_the_same_to_the_bit_every_time",
            "tests/ops/layer_norm/test_cuda.py",
            _SETTLED + "test_networks_are_the_same_to_the_bit_every_time",
        ),
        ("same_to_the_bit",),
    ),
    Claim("several threads at once", (_DEVICE + "test_threads_at_once", _RNN + "test_threads_at_once")),
    Claim("sums have the bits of the host's", (_SETTLED + "test_sums_have_the_bits_of_the_host",)),
    Claim("tensors of more than 2^31 elements", (_SETTLED + "test_more_than_2_31_elements",)),
    Claim("copies of registered and of other memory", (_SETTLED + "test_copies",)),
    Claim("memory at full concurrency is bounded and given back", (_SETTLED + "test_memory_at_full_concurrency",)),
    Claim("a GPU other than the first takes no memory of the first", (_SETTLED + "test_contexts",)),
)


def tests() -> list[str]:
    """Returns the files of all tests that judge claims."""
    return sorted({test.partition("::")[0] for claim in CLAIMS for test in claim.tests})
