"""Models with a rule for each layer: windows, prefixes, right contexts. Stock attention, ``True`` hides.

The healthy :class:`Stack` is a module of blocks that each hand a hidden stream on, so that an audit can look into
every layer; a broken model is one with a mask wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from broken_models.catalog import caught_by
from pellucid.audits.probes.tokens_probe import TokensProbe
from pellucid.probe import Visibility
from pellucid.visibility import causal, full, lookahead, prefix, sinks, window

WIDTH = 16


class Block(nn.Module):
    """Pre-norm attention and a feed-forward, told what is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x_BTD: Tensor, hidden_TT: Tensor) -> Tensor:
        h_BTD = self.norm(x_BTD)
        x_BTD = x_BTD + self.attention(h_BTD, h_BTD, h_BTD, attn_mask=hidden_TT, need_weights=False)[0]
        return x_BTD + self.down(torch.relu(self.up(self.norm(x_BTD))))


class Stack(nn.Module):
    """Three layers: the first and last look 3 tokens wide, the middle one sees all that came before."""

    rules: tuple[Visibility, ...] = (causal() & window(3), causal(), causal() & window(3))

    def __init__(self, vocab_size: int = 23, positions: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(positions, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in self.rules)
            self.out = nn.Linear(WIDTH, vocab_size)

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        """``Bool[T, T]`` from how far the key lies back (negative: ahead)."""
        return (back_TT >= 0) & (back_TT < (64 if layer == 1 else 3))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x_BTD = self.table(tokens) + self.places(places)
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, ~self.sees(places[:, None] - places, layer))
        return self.out(x_BTD)

    def probe(self) -> TokensProbe:
        """How an audit calls this model."""
        return TokensProbe(
            self, vocab_size=self.table.num_embeddings, rules=self.rules, max_length=self.places.num_embeddings
        )


class WindowsSwapped(Stack):
    """The list of local layers was read from the wrong end of the pattern: local and global changed places."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return (back_TT >= 0) & (back_TT < (3 if layer == 1 else 64))


class WindowLostInOneLayer(Stack):
    """The last local layer fell back to a kernel without windows."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return super().sees(back_TT, min(layer, 1))


class WindowOneTooNarrow(Stack):
    """The window was taken to leave out the current token's own place: w−1 keys where w are declared."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return super().sees(back_TT, layer) & (back_TT < (64 if layer == 1 else 2))


class WindowLeaksTheFirst(Stack):
    """Token 0 stays visible as if it were a sink, which nobody declared."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        first_TT = torch.zeros_like(back_TT, dtype=torch.bool)
        first_TT[:, 0] = True
        return super().sees(back_TT, layer) | (first_TT & (back_TT >= 0))


class PrefixStack(Stack):
    """Two layers in which the first four tokens see each other; the rest is causal."""

    rules = ((causal() | prefix(4)),) * 2
    length = 4

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        inside_T = torch.arange(len(back_TT)) < self.length
        return (back_TT >= 0) | (inside_T[:, None] & inside_T)


class PrefixIsCausal(PrefixStack):
    """The prefix was forgotten: its tokens see only what came before them."""

    length = 0


class PrefixOneTooLong(PrefixStack):
    """The end of the prefix was counted inclusively: its tokens see the first one to be predicted."""

    length = 5


class PrefixOneTooShort(PrefixStack):
    """The last token of the prefix is treated as text to come."""

    length = 3


class PrefixSeesAll(PrefixStack):
    """Prefix tokens may look anywhere, not only into the prefix."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        inside_T = torch.arange(len(back_TT)) < self.length
        return (back_TT >= 0) | inside_T[:, None]


class PrefixLostInOneLayer(PrefixStack):
    """The second layer forgot the prefix: over both layers together all of it is still reached."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return back_TT >= 0 if layer else super().sees(back_TT, layer)


class SinksStack(Stack):
    """Two layers of a window of three beside two sinks."""

    rules = (causal() & (window(3) | sinks(2)),) * 2
    width, kept = 3, 2

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        first_T = torch.arange(len(back_TT)) < self.kept
        return (back_TT >= 0) & ((back_TT < self.width) | first_T)


class WindowLostBesideSinks(SinksStack):
    """The kernel that keeps sinks has no window: everything before is seen."""

    width = 64


class WindowWiderBesideSinks(SinksStack):
    """The window is counted besides the token itself where there are sinks."""

    width = 4


class SinksLostInOneLayer(SinksStack):
    """The second layer has the window alone: through the first one the sinks are reached all the same."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return super().sees(back_TT, layer) & ((back_TT < self.width) | (layer == 0))


class PlainStack(Stack):
    """Two causal layers."""

    rules = (causal(),) * 2

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return back_TT >= 0


class SeesItselfInOneLayer(PlainStack):
    """The second layer was handed a mask of the diagonal: it mixes nothing."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return back_TT == 0 if layer else back_TT >= 0


class WindowNobodyDeclared(PlainStack):
    """Both layers look four tokens wide, though they are said to see all that came before."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return (back_TT >= 0) & (back_TT < 4)


class BothWays(Stack):
    """An encoder of two layers: everyone sees everyone."""

    rules = (full(),) * 2

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return torch.ones_like(back_TT, dtype=torch.bool)


class SecondLayerOneWay(BothWays):
    """The encoder's second layer is causal: over both together all is reached."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return back_TT >= 0 if layer else super().sees(back_TT, layer)


class FirstLayerLooksAheadOnly(BothWays):
    """The encoder's first layer has a causal mask the wrong way round."""

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return super().sees(back_TT, layer) if layer else back_TT <= 0


class RightContext(Stack):
    """One layer that looks four tokens ahead and everything back."""

    rules = (lookahead(4),)
    ahead = 4

    def sees(self, back_TT: Tensor, layer: int) -> Tensor:
        return back_TT >= -self.ahead


class RightContextOneShort(RightContext):
    """A right context of r frames admits r−1 of them."""

    ahead = 3


class RightContextOneLong(RightContext):
    """A right context of r frames admits r+1 of them."""

    ahead = 5


BROKEN_MODELS = (
    *caught_by(
        "window",
        WindowsSwapped,
        WindowLostInOneLayer,
        WindowOneTooNarrow,
        WindowLeaksTheFirst,
        WindowLostBesideSinks,
        WindowWiderBesideSinks,
        SinksLostInOneLayer,
        SeesItselfInOneLayer,
        WindowNobodyDeclared,
        FirstLayerLooksAheadOnly,
    ),
    *caught_by(
        "prefix",
        PrefixIsCausal,
        PrefixOneTooLong,
        PrefixOneTooShort,
        PrefixSeesAll,
        RightContextOneShort,
        RightContextOneLong,
        PrefixLostInOneLayer,
        SecondLayerOneWay,
    ),
)
