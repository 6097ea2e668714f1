"""Text to image: DiT or, by options, LightningDiT, with cross-attention to a caption in each block.

Between attention and MLP, picture tokens give the queries and the text gives keys and values (as in PixArt-α, Chen et
al. 2023, arXiv 2310.00426). The text is normalised and projected once to the tokens' width; its pooled vector is added
to the timestep's conditioning. The last projections of cross-attention and of the pooled vector start at zero, so the
text has no effect on an untrained network. Only picture tokens skip blocks: each block sees the whole text. With
norm="layer", mlp="gelu" and positions="sincos", all parameters but the text's are DiT's (dit.py), with the same names.

Shapes: B samples, N picture tokens, T text tokens, D hidden size, C and P channels of text tokens and pooled text."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from dit import DiTBlock, MlpKind, Norm, attend, make_norm
from routing_module import readable
from tread.models.backbone import modulate
from tread.models.conditions import Text, each
from tread.models.lightning import DIT_PARTS, LightningDiT


class CrossAttention(nn.Module):
    """Multi-head attention of picture tokens to a text; outputs 0 before training. (B, N, D), (B, T, D) → (B, N, D)."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // num_heads, eps=1e-6) if qk_norm else None for _ in range(2))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """Let tokens x (B, N, D) attend to the text (B, T, D); mask (B, T) bool is False for padding."""
        q = self.q(x).unflatten(2, (self.num_heads, -1))  # (B, N, H, d)
        k, v = self.kv(text).unflatten(2, (2, self.num_heads, -1)).unbind(2)  # (B, T, H, d)
        return attend(self, q, k, v, mask=mask)


class TextBlock(DiTBlock):
    """DiT's block with cross-attention to a text before the MLP. FLOPs are counted for a text of text_tokens tokens."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, norm: Norm, mlp: MlpKind, qk_norm: bool, text_tokens: int
    ) -> None:
        super().__init__(dim, num_heads, mlp_ratio, norm, mlp, qk_norm)
        self.text_tokens = text_tokens
        self.cross_norm = make_norm(norm, dim)
        self.cross_attn = CrossAttention(dim, num_heads, qk_norm)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens x (B, N, D) to tokens; if self.returns_values is set, also return the self-attention's values
        (B, N, heads, D/heads). `given`: the further arguments of Attention.forward, if there are any (rotary table,
        first block's values), then conditioning c (B, D), text (B, T, D) and its mask (B, T) bool."""
        *along, c, text, mask = given
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        change, values = self.attn(modulate(self.norm1(x), shift1, scale1), *along)
        x = x + gate1.unsqueeze(1) * change
        x = x + self.cross_attn(self.cross_norm(x), text, mask)
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return (x, values.contiguous()) if self.returns_values else x

    def multiply_adds(self, tokens: int, attention: bool = True) -> int:
        kv, T = self.cross_attn.kv, self.text_tokens  # kv runs on the text instead of the tokens
        products = tokens * T * kv.out_features if attention else 0
        weights = sum(layer.weight.numel() for layer in kv.modules() if isinstance(layer, nn.Linear))  # LoRA's too
        return super().multiply_adds(tokens, attention) + (T - tokens) * weights + products


class TextEmbedder(nn.Module):
    """Embed a text as a vector (B, D), added to the conditioning, and tokens (B, T, D) with a mask (B, T), for blocks.

    width       channels C of the encoder's tokens; None: texts are word ids, embedded here with learned positions.
    pooled      channels P of the encoder's pooled text; None: the mean of the tokens is used instead.
    vocabulary  number of word ids if width and pooled are None; None if width is given. Other combinations: ValueError.
    """

    def __init__(
        self, dim: int, text_tokens: int, width: int | None, pooled: int | None, vocabulary: int | None, norm: Norm
    ) -> None:
        super().__init__()
        if (width is None) == (vocabulary is None) or (vocabulary and pooled):
            given = f"text width {width}, pooled {pooled} and vocabulary {vocabulary} do not fit"
            raise ValueError(f"{given}: give a width, with or without pooled, or a vocabulary")
        self.text_tokens, self.width, self.pooled, self.vocabulary = text_tokens, width, pooled, vocabulary
        if vocabulary:
            self.words = nn.Embedding(vocabulary, dim)
            self.places = nn.Embedding(text_tokens, dim)
        width = width or dim
        self.norm, self.proj = make_norm(norm, width), nn.Linear(width, dim)
        self.pooled_norm, self.pooled_proj = make_norm(norm, pooled or width), nn.Linear(pooled or width, dim)

    def initialize(self) -> None:
        for table in (self.words, self.places) if self.vocabulary else ():
            nn.init.normal_(table.weight, std=0.02)
        nn.init.zeros_(self.pooled_proj.weight)

    def forward(self, y: Text) -> tuple[Tensor, ...]:
        if self.vocabulary:
            tokens = self.words(y.tokens.masked_fill(~y.mask, 0)) + self.places.weight
        else:
            tokens = y.tokens.to(self.proj.weight.dtype)
        tokens = tokens.masked_fill(~y.mask.unsqueeze(2), 0)
        pooled = tokens.sum(1) / y.mask.sum(1, keepdim=True) if y.pooled is None else y.pooled.to(tokens.dtype)
        return self.pooled_proj(self.pooled_norm(pooled)), self.proj(self.norm(tokens)), y.mask

    def multiply_adds(self) -> int:
        return self.text_tokens * self.proj.weight.numel() + self.pooled_proj.weight.numel()

    def check(self, y: Text, batch: int) -> None:
        """Raise ValueError unless y is a Text for `batch` samples in the shapes of this network's text encoder and,
        checked only on a CPU and outside compiled graphs, each sample's mask has a True."""
        if not hasattr(y, "mask"):
            raise ValueError(f"y is {type(y).__name__}, but this network takes Text(tokens, mask, pooled)")
        T = self.text_tokens
        expected = {
            "tokens": (batch, T) if self.vocabulary else (batch, T, self.width),
            "mask": (batch, T),
            "pooled": self.pooled and (batch, self.pooled),
        }
        for name, shape in expected.items():
            given = None if getattr(y, name) is None else tuple(getattr(y, name).shape)
            if given != shape:
                raise ValueError(f"the text's {name} have shape {given}, but this network's encoder gives {shape}")
        if readable(y.mask) and not y.mask.any(dim=1).all():
            raise ValueError("a text has no token at all: the empty caption is one begin token")


class TextDiT(LightningDiT):
    """The network F(x; t, y) for texts y of `text_tokens` tokens with text_width channels (None: word ids 0 to
    vocabulary − 1) and, unless text_pooled is None, a pooled vector of text_pooled channels. `given` are LightningDiT's
    other arguments, but norm, mlp and positions default to DiT's choices."""

    def __init__(
        self, *, text_tokens: int, text_width: int | None = None, text_pooled: int | None = None,
        vocabulary: int | None = None, **given: Any,
    ) -> None:  # fmt: skip
        given = DIT_PARTS | given
        text = {"text_tokens": text_tokens, "width": text_width, "pooled": text_pooled, "vocabulary": vocabulary}
        embedder = partial(TextEmbedder, **text, norm=given["norm"])
        block = partial(TextBlock, text_tokens=text_tokens)
        super().__init__(num_classes=None, block=block, embedder=embedder, **given)
        mask = self.pos_embed.new_zeros(1, text_tokens).bool()
        mask[:, 0] = True
        tokens = mask.long() * 0 if vocabulary else self.pos_embed.new_zeros(1, text_tokens, text_width)
        self.register_buffer("null_tokens", tokens)
        self.register_buffer("null_mask", mask)
        self.register_buffer("null_pooled", self.pos_embed.new_zeros(1, text_pooled) if text_pooled else None)

    def initialize(self, init: str) -> None:
        super().initialize(init)
        for block in self.blocks:
            nn.init.zeros_(block.cross_attn.proj.weight)

    def take_null(self, text: Text) -> None:
        """Store the encoded empty caption (1, …), for `null`. Raises ValueError if it does not fit the network."""
        self.y_embedder.check(text, 1)
        each(Tensor.copy_, Text(self.null_tokens, self.null_mask, self.null_pooled), text)

    def null(self, count: int) -> Text:
        """Return the empty caption for `count` samples, stored by take_null or loaded; in a new network zeros."""
        held = Text(self.null_tokens, self.null_mask, self.null_pooled)
        return each(lambda part: part.expand(count, *part.shape[1:]), held)

    def forward_flops(self, *given: object, **more: object) -> int:
        """Return the FLOPs of one sample's forward pass, including the text's projections; arguments as in Backbone."""
        return super().forward_flops(*given, **more) + 2 * self.y_embedder.multiply_adds()
