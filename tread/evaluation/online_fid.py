"""FID of a few samples while a network trains: a trend, by the functions that fid.py scores with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tread.data.latents import LatentSpec
from tread.diffusion.labels import seeded_labels
from tread.diffusion.sampling import Model, Sampler, draw_pictures
from tread.encoders.autoencoder import Decoder
from tread.encoders.inception import Inception, extract, find_weights, load_inception
from tread.evaluation.metrics import Moments, frechet_distance
from tread.evaluation.reference import Statistics, check_size, open_reference
from tread.runtime.device import use_cores
from tread.runtime.distributed import Processes


@dataclass(frozen=True)
class OnlineFID:
    """What FID in training needs: the Inception, the reference's statistics, and how latents become pictures."""

    inception: Inception
    statistics: Statistics
    decoder: Decoder

    def moments(
        self, model: Model, seeds: Sequence[int], sampler: Sampler, stopped: Callable[[], bool] = lambda: False
    ) -> Moments:
        """Mean and covariance of the features of samples, one for each seed, which gives its label too.

        stopped  asked after each batch; True leaves out the rest.
        """
        labels = seeded_labels(seeds, model.network.num_classes, "random")

        def pictures() -> Iterator[torch.Tensor]:
            for batch in draw_pictures(model, self.decoder, seeds, labels, sampler):
                yield batch
                if stopped():
                    return

        return Moments.of_parts(extract(self.inception, batch)["pool"] for batch in pictures())

    def fid(self, samples: Moments, cpu_threads: int | None = None) -> float:
        """FID of samples, of which `moments` may have come from several processes.

        cpu_threads  for this one process, while the others wait: see use_cores.
        """
        threads = torch.get_num_threads()
        use_cores(cpu_threads, processes=1)
        try:
            return frechet_distance(*samples.gaussian, *self.statistics)
        finally:
            torch.set_num_threads(threads)


def open_online_fid(
    reference: Path,
    samples: int,
    inception: str | None,
    latents: LatentSpec,
    decoder: Decoder,
    processes: Processes,
) -> OnlineFID:
    """Open a reference with mu and sigma, and the Inception.

    samples    how many will be drawn, by all processes.
    inception  see find_weights.

    Raises FileNotFoundError, or ValueError, also if the decoder's pictures are not of the reference's size.
    """
    if samples < processes.count:
        raise ValueError(f"eval.fid_samples is {samples}, which is less than one for each process")
    opened = open_reference(reference, None, processes, sizes=None)
    if opened.pool is None:
        raise ValueError(
            f"{reference} has no mu and sigma: python fid.py reference={reference} save_reference=stats.npz"
        )
    pictures = decoder(torch.zeros(1, *latents.shape, device=processes.device))
    check_size("what this run's autoencoder decodes", tuple(pictures.shape[1:]), opened)
    with processes.main_first():  # one process fetches the weights
        weights = find_weights(inception)
    network = load_inception(weights, processes.device)
    return OnlineFID(network, open_reference(reference, None, processes, network.sizes).pool, decoder)
