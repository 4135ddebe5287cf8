"""Attention from hash codes: YOSO in linear time, and softmax from the colliding pairs."""

from lshkit import _torch  # noqa: F401
from lshkit.attention.bert_lsh import bert_lsh_attention
from lshkit.attention.code_cache import CodeCache, StepReport
from lshkit.attention.collided_softmax import lsh_attention
from lshkit.attention.decoding import YosoState
from lshkit.attention.estimators import Colliding, Estimator, Expected, Sampled, Soft
from lshkit.attention.functional import yoso_attention
from lshkit.attention.modules import YosoAttention
from lshkit.attention.softmax_cache import SoftmaxCache
from lshkit.attention.suggestions import Suggestion, Suggestions, suggest

__all__ = [
    "CodeCache",
    "Colliding",
    "Estimator",
    "Expected",
    "Sampled",
    "Soft",
    "SoftmaxCache",
    "StepReport",
    "Suggestion",
    "Suggestions",
    "YosoAttention",
    "YosoState",
    "bert_lsh_attention",
    "lsh_attention",
    "suggest",
    "yoso_attention",
]
