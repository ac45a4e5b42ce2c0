"""Equations in plain text, such as ``c_i+ = c_i - m + (z - y_K) / H``, as MathML, which browsers render by themselves."""

from __future__ import annotations

import re
from html import escape

SYMBOLS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "eta": "η",
    "lam": "λ",
    "mu": "μ",
    "rho": "ρ",
    "tau": "τ",
    "sigma": "σ",
    "Delta": "Δ",
    "m_hat": "m̂",
    "v_hat": "v̂",
    "sum": "∑",
    "-": "−",
    "<-": "←",
    "||": "‖",
}
RELATIONS = ("=", "<-", "←", "≈", "≤", "<", "~")
SUPERSCRIPTS = {"²": "<mn>2</mn>", "ᵀ": "<mi>T</mi>"}
PARAMETERS = ("final_lr", "server_lr", "weight_decay", "weights_lr")
"""Names with an underscore that is no subscript."""
_TOKEN = re.compile(
    r"\s+|final_lr|server_lr|weight_decay|weights_lr|[mv]_hat|[A-Za-zΑ-ω]+\u0304?\d*|\d+(?:\.\d+)?|<-|\|\||."
)
_FENCE = re.compile(r"^```equations\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def render_equations(markdown: str) -> str:
    """A page with every block of equations replaced by MathML."""
    return _FENCE.sub(lambda block: mathml(block[1].splitlines()), markdown)


def mathml(lines: list[str]) -> str:
    """A displayed table of equations, one per line, aligned at their first relation.

    >>> mathml(["q = g / H"]).partition("<mtr>")[2].partition("</mtr>")[0]
    '<mtd><mi>q</mi></mtd><mtd><mo>=</mo><mfrac><mrow><mi>g</mi></mrow><mrow><mi>H</mi></mrow></mfrac></mtd>'
    """
    rows = "".join(f"<mtr>{_cells(line)}</mtr>" for line in lines)
    return f'<div class="equations"><math display="block"><mtable displaystyle="true" columnalign="right left">{rows}</mtable></math></div>'


def _cells(line: str) -> str:
    left, relation, right = re.split(r"(?<= )(<-|[=←≈])(?= )", line, maxsplit=1)
    return f"<mtd>{Parser(left).all()}</mtd><mtd>{_operator(relation)}{Parser(right).all()}</mtd>"


def _operator(text: str) -> str:
    return f"<mo>{escape(SYMBOLS.get(text, text))}</mo>"


class Parser:
    """A parser of one side of an equation.

    Adjacent factors form a product, ``a / b`` with spaces is a fraction, ``k/K`` is not, and a plus directly after a
    subscript is a superscript.

    >>> Parser("c_i+").all()
    '<msubsup><mi>c</mi><mi>i</mi><mo>+</mo></msubsup>'
    >>> Parser("beta2 q^2").all()
    '<msub><mi>β</mi><mn>2</mn></msub><mspace width="0.2em"/><msup><mi>q</mi><mn>2</mn></msup>'
    """

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text.strip())
        self._next = 0
        self._groups: dict[str, str] = {}  # the content of each group, without its parentheses

    def all(self) -> str:
        """The MathML of the whole text; text that cannot be parsed raises a ``ValueError``."""
        row = self._row("")
        if self._peek():
            raise ValueError(f"cannot parse the equation {''.join(self._tokens)!r} at {self._peek()!r}")
        return row

    def _peek(self, ahead: int = 0) -> str:
        """The token ``ahead`` of the next one; empty at the end."""
        return self._tokens[self._next + ahead] if self._next + ahead < len(self._tokens) else ""

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1]

    def _row(self, end: str) -> str:
        """Terms and the operators between them, up to the token ``end``, which is consumed."""
        done: list[str] = []
        term: list[str] = []  # the factors of the product that is being read
        while self._peek() and self._peek() != end:
            token = self._peek()
            if token.isspace():
                self._take()
                if self._peek() == "/" and self._peek(1).isspace():
                    self._next += 2
                    below = self._factor()
                    above, below = (self._groups.get(part, part) for part in (_product(term), below))
                    term = [f"<mfrac><mrow>{above}</mrow><mrow>{below}</mrow></mfrac>"]
            elif token in ("+", "-", ",", ":", "/", "·", *RELATIONS):
                done += [_product(term), _operator(self._take())]
                term = []
            elif token in (")", "}"):
                break
            else:
                term.append(self._factor())
        if end and self._take() != end:
            raise ValueError(f"expected {end!r} in the equation {''.join(self._tokens)!r}")
        return "".join([*done, _product(term)])

    def _factor(self) -> str:
        """A symbol, number or group with its scripts and, directly after it, arguments in parentheses."""
        token = self._take()
        if token == "(":
            content = self._row(")")
            stretch = "" if "<mfrac>" in content else ' stretchy="false"'
            base = f"<mrow><mo{stretch}>(</mo>{content}<mo{stretch}>)</mo></mrow>"
            self._groups[base] = content
        elif token in ("|", "||", "‖"):
            base = f"<mrow>{_operator(token)}{self._row(token)}{_operator(token)}</mrow>"
        elif token == "sqrt" and self._peek() == "(":
            self._take()
            base = f"<msqrt>{self._row(')')}</msqrt>"
        else:
            base = _symbol(token)
        below = above = ""
        while self._peek() in ("_", "^", *SUPERSCRIPTS) or (below and not above and self._is_plus_script()):
            mark = self._take()
            if mark == "_":
                below = self._script()
            else:
                above = SUPERSCRIPTS.get(mark) or ("<mo>+</mo>" if mark == "+" else self._script())
        if below or above:
            tag = "msubsup" if below and above else "msub" if below else "msup"
            base = f"<{tag}>{base}{below}{above}</{tag}>"
        if self._peek() == "(" and token != "(":
            base += self._factor()
        return base

    def _is_plus_script(self) -> bool:
        return self._peek() == "+" and (self._peek(1) in ("", ")", ",") or self._peek(1).isspace())

    def _script(self) -> str:
        token = self._take()
        if token in ("(", "{"):
            return f"<mrow>{self._row(')' if token == '(' else '}')}</mrow>"
        return _symbol(token)


def _symbol(token: str) -> str:
    if token in PARAMETERS:
        return f"<mtext>{token}</mtext>"
    if token[0].isdigit() or token == "½":
        return f"<mn>{token}</mn>"
    letters = token.rstrip("0123456789")
    if not letters[0].isalpha() and letters not in ("∇", "…"):
        raise ValueError(f"unknown symbol {token!r} in an equation")
    shown = f"<mo>{SYMBOLS[letters]}</mo>" if letters == "sum" else f"<mi>{SYMBOLS.get(letters, letters)}</mi>"
    return f"<msub>{shown}<mn>{token[len(letters) :]}</mn></msub>" if letters != token else shown


def _product(factors: list[str]) -> str:
    return '<mspace width="0.2em"/>'.join(factors)
