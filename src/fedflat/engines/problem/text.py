"""Tasks for text: a class for each token, with perplexity, and a class for each text, with the F1 score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.data import IGNORED_TOKEN
from fedflat.engines.problem.objective import divergence
from fedflat.engines.problem.task import Classification, added_means


@dataclass(frozen=True)
class TokenPrediction:
    """Cross-entropy, accuracy and perplexity per token: language models, and labels of tokens.

    Outputs are logits [batch, length, classes], targets are [batch, length]. A target of -100 does not count. Means
    are over the tokens that count, so a long text has a larger weight than a short one. The exact match is the fraction
    of texts whose counted tokens are all predicted correctly, with teacher forcing.

    Attributes:
        metric: name of the primary metric: ``accuracy``, ``perplexity`` or ``exact_match``, computed only if primary.
    """

    metric: str = "accuracy"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy over the tokens of a batch that count; 0 if there are none."""
        return self._summed_loss(output, target) / self.weight(target).clamp(min=1)

    def _summed_loss(self, output: Tensor, target: Tensor) -> Tensor:
        logits = output.reshape(-1, output.shape[-1])
        return F.cross_entropy(logits, target.reshape(-1), ignore_index=IGNORED_TOKEN, reduction="sum")

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of targets that count: the weight of a batch in a mean over batches."""
        return (target != IGNORED_TOKEN).sum()

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the summed cross-entropy, the number of correct predictions, and the number of tokens that count.

        With the metric ``exact_match``, also the number of texts predicted exactly and the number of texts that have at
        least one token that counts.
        """
        correct, counts = output.argmax(-1) == target, target != IGNORED_TOKEN
        sums = {"loss": self._summed_loss(output, target), "accuracy": correct.sum(), "tokens": counts.sum()}
        if self.metric == "exact_match":
            sums |= {"exact_match": ((correct | ~counts).all(1) & counts.any(1)).sum(), "texts": counts.any(1).sum()}
        return sums

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Return the means over tokens, and the perplexity, the exponential of the mean cross-entropy.

        Args:
            totals: the results of ``sums``, added over batches.
            count: number of texts; a scalar that a subclass adds to ``sums`` becomes a mean over texts.
        """
        tokens = max(float(totals["tokens"]), 1.0)
        loss = float(totals["loss"]) / tokens
        metrics = {
            "loss": loss,
            "accuracy": float(totals["accuracy"]) / tokens,
            "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),  # infinite, not an error, if too large
            **added_means(totals, {"loss", "accuracy", "tokens", "exact_match", "texts"}, count),
        }
        if self.metric == "exact_match":
            metrics["exact_match"] = float(totals["exact_match"]) / max(float(totals["texts"]), 1.0)
        return metrics

    def distillation(self, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the mean KL divergence from the teacher's predictions over the tokens of a batch that count."""
        divergences = divergence(output.movedim(-1, 1), teacher_output.movedim(-1, 1), temperature)
        counts = target != IGNORED_TOKEN
        return torch.where(counts, divergences, 0).sum() / counts.sum().clamp(min=1)


@dataclass(frozen=True)
class F1Classification(Classification):
    """Cross-entropy, accuracy and F1 score of classes, one per example.

    Outputs are logits [batch, classes], targets are labels [batch]. If a model of text returns logits for every
    position, [batch, length, classes], those of the last position count.

    The F1 score of a class is the harmonic mean of its precision and recall; ``f1`` is the mean over the classes that
    occur (macro F1).

    Attributes:
        metric: name of the primary metric, ``accuracy`` or ``f1``.
    """

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return super().loss(_last(output), target)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return sums over a batch.

        Returns:
            ``class_loss``, ``examples`` and ``hits`` [classes] are the summed cross-entropy, the number and the number
            of correct predictions of each class's examples; ``predicted`` [classes] counts predictions of each class.
        """
        logits = _last(output)
        classes = logits.shape[1]
        truth, prediction = F.one_hot(target, classes), F.one_hot(logits.argmax(1), classes)
        losses = F.cross_entropy(logits, target, reduction="none").double()
        return {
            "class_loss": losses @ truth.double(),  # a product, because scatter_add on a GPU sums in no fixed order
            "examples": truth.sum(0),
            "predicted": prediction.sum(0),
            "hits": (truth * prediction).sum(0),
        }

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Return mean cross-entropy, accuracy and macro F1.

        Args:
            totals: the results of ``sums``, added over batches.
            count: number of examples.
        """
        scores, occurs = _f1(totals), totals["examples"] > 0
        return {
            "loss": float(totals["class_loss"].sum()) / count,
            "accuracy": float(totals["hits"].sum()) / count,
            "f1": float(scores[occurs].mean()),
            **added_means(totals, {"class_loss", "examples", "predicted", "hits"}, count),
        }

    def by_class(self, totals: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
        """Return mean cross-entropy, accuracy (recall), F1 score and number of examples of each class that occurs.

        ``totals`` are the results of ``sums``, added over batches.
        """
        examples, scores = totals["examples"], _f1(totals)
        return {
            label: {
                "loss": float(totals["class_loss"][label] / examples[label]),
                "accuracy": float(totals["hits"][label] / examples[label]),
                "f1": float(scores[label]),
                "examples": int(examples[label]),
            }
            for label in range(len(examples))
            if examples[label] > 0
        }

    def distillation(self, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the mean KL divergence of a batch from the teacher's predictions."""
        return super().distillation(_last(output), _last(teacher_output), target, temperature)


def _last(output: Tensor) -> Tensor:
    """The logits of a text [batch, classes]: those of the last position if there are logits for every position."""
    return output[:, -1] if output.ndim == 3 else output


def _f1(totals: Mapping[str, Tensor]) -> Tensor:
    """F1 score of each class [classes]: 2 hits / (examples + predictions)."""
    return 2 * totals["hits"].double() / (totals["examples"] + totals["predicted"]).clamp(min=1)
