"""Equations become MathML."""

import re

import pytest
from markdown import markdown

from deploy.site.equations import UnknownCommandError, as_mathml


@pytest.mark.parametrize(
    ("text", "equations"),
    [
        ("the mean $\\mu$ of $x_1$, $x_2$", 3),
        ("$a_i * b_i$ and $c_i * d_i$", 2),
        ("`$HOME` and `$x$`", 0),
        ("costs $5 or $6", 0),
        ("escaped \\$x$", 0),
        ("$ not $ one", 0),
    ],
)
def test_equations_in_a_line(text: str, equations: int) -> None:
    html = markdown(text, extensions=["deploy.site.equations"])
    assert html.count("<math ") == equations
    assert "<em>" not in html


@pytest.mark.parametrize(
    "latex",
    [
        r"\bar{g} = \frac{\sum_i w_i g_i}{\sum_i w_i}",
        r"y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta",
        r"h' = u \odot h + (1 - u) \odot \tanh(W_c [x, r \odot h] + b_c)",
        r"\frac{\partial L}{\partial x} = \begin{pmatrix} a & b \\ c & d \end{pmatrix} \cdot \mathbf{1}",
    ],
)
def test_latex_of_the_ops_is_known(latex: str) -> None:
    assert re.fullmatch(r"<math .*</math>", as_mathml(latex, "block"), re.DOTALL)


def test_an_unknown_command_is_an_error() -> None:
    with pytest.raises(UnknownCommandError, match="nosuchcommand"):
        as_mathml(r"x + \nosuchcommand{y}")
