"""TreadPipeline, a sampler by diffusers' conventions. Exports hold it and all code it needs in pipeline.py."""

import operator
from collections.abc import Callable, Sequence
from functools import partial

import diffusers
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from rf import RF
from routing_module import Route
from tread.data.columns import TextSpec
from tread.data.latents import LatentSpec, from_network, to_uint8
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import KINDS, Guidance
from tread.diffusion.labels import Label, class_labels, class_number
from tread.diffusion.pictures import Output, in_form, to_pictures
from tread.diffusion.sampling import Model, Sampler, draw
from tread.diffusion.solvers import Churn
from tread.encoders.autoencoder import decoded
from tread.encoders.language import encoder_for
from tread.runtime.device import avoid_faults, exact
from tread.runtime.schema import Count, check


class TreadPipeline(DiffusionPipeline):
    """Draws pictures with a network that was trained with or without token routing (TREAD, arXiv 2501.04765).

    transformer  the network.
    vae          the autoencoder that decodes its latents. None: the network draws pixels, or its autoencoder is loaded
                 from the hub id `autoencoder` when first needed.

    The other arguments say how the network was trained: objective "edm" or "rf"; process, latents, text and each of
    the routes, dicts of the fields of EDM or RF, LatentSpec, TextSpec (None: trained on classes) and Route; and the
    fractions of training samples without a class (label_drop) and, for SPRINT, without its sparse part (path_drop).
    """

    _optional_components = ["vae"]

    def __init__(
        self,
        transformer,
        vae,
        objective="edm",
        process=None,
        latents=None,
        routes=None,
        text=None,
        autoencoder=None,
        label_drop=0.0,
        path_drop=0.0,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        told = {"objective": objective, "process": process, "latents": latents, "routes": routes, "text": text}
        self.register_to_config(**told, autoencoder=autoencoder, label_drop=label_drop, path_drop=path_drop)

    @property
    def latents(self) -> LatentSpec:
        return LatentSpec.from_json(self.config.latents)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Label | Sequence[Label] = None,
        prompt: str | Sequence[str] | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        *,
        seeds: int | Sequence[int] | None = None,
        guidance: str | None = None,
        strong: float | None = None,
        weak: float | None = None,
        interval: Sequence[float] | None = None,
        same_ids: bool = False,
        solver: str | None = None,
        shift: float | None = None,
        churn: float = 0.0,
        batch_size: int = 64,
        text_encoder: str | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        """Draw one picture per class label or prompt; for a single one, one per seed or listed generator. Returns an
        ImagePipelineOutput with `images`, or the tuple (images,) if return_dict is False.

        class_labels          names or numbers of classes, one or several; None in a list draws without a class.
        prompt                texts, one or several, instead of class_labels, for a network trained on captions.
        seeds                 one per picture (same pictures as TREAD's sample.py); None: drawn from torch's global RNG.
        generator             a torch.Generator, or one per picture, instead of seeds; it draws different pictures.
        num_inference_steps   None: 40 steps of Heun's method for EDM, 50 of Euler's for rectified flow.
        guidance_scale        ω in D_weak + ω·(D_strong − D_weak); 1: no guidance; None: 1.5 if `guidance` is given.
        guidance              what D_weak lacks. "cfg": class or prompt; "sparse": more tokens than D_strong lacks;
                              "sparse_cfg": both; "path_drop_class": SPRINT's sparse part; "path_drop": that and class.
                              None: "cfg" if guidance_scale is given and not 1, else no guidance.
        strong, weak          for "sparse…" (Sparse Guidance, arXiv 2601.01608): fractions of the tokens that skip the
                              trained routes' blocks in D_strong and D_weak; None: 0.3, at most `weak`, and 0.7.
        interval              (lowest, highest) noise level, σ (EDM) or t (rectified flow), at which guidance is on.
        same_ids              True, for "sparse…": D_strong and D_weak pick tokens by the same random numbers.
        solver                "heun" or "euler"; None: Heun for EDM, Euler for rectified flow.
        shift                 rectified flow's s: u=1−t → s·u/(1+(s−1)·u); s<1: more steps near noise; None: as trained.
        churn                 S_churn of EDM's stochastic Heun sampler; 0: no noise is added.
        batch_size            most pictures drawn at once.
        text_encoder          hub id or folder of the text encoder; None: the one used in training.
        output_type           "pil", "np" (n, H, W, C) and "pt" (n, C, H, W) in 0..1, or "latent", the decoder's input.
        callback_on_step_end  called after each step of a batch with the pipeline, the step's number, the noise level
                              before it, and {"latents": …} ({} if callback_on_step_end_tensor_inputs lacks "latents");
                              may return {"latents": …} to continue with.

        Raises ValueError for arguments that do not fit together or with the network.
        """
        check("output_type", output_type, Output)
        check("batch_size", batch_size, Count)
        avoid_faults(self.transformer.device)
        if shift is not None and self.config.objective != "rf":
            raise ValueError(f"shift={shift:g} is for rectified flow, but this network was trained by EDM")
        given = {} if shift is None else {"shift": shift}
        process = {"edm": EDM, "rf": RF}[self.config.objective](**{**self.config.process, **given})
        kind = guidance or ("none" if guidance_scale in (None, 1) else "cfg")
        row = KINDS.get(kind, KINDS["none"])
        if row.weak_network == "must":
            raise ValueError(f"guidance={kind} needs a second network, which is not here: 'sparse' weakens this one")
        fractions = (min(0.3, 0.7 if weak is None else weak), 0.7) if row.routed else (0.0, 0.0)
        usual = (1.0 if kind == "none" else 1.5, *fractions)
        settings = [float(a if b is None else b) for a, b in zip(usual, (guidance_scale, strong, weak))]
        guide = Guidance(kind, *settings, tuple(interval) if interval else None, same_ids=same_ids)
        self._check_trained_for(guide)
        labels, text = self._conditions(class_labels, prompt, text_encoder)
        noise, seeds = self._noise(generator, seeds, len(labels))
        labels = labels * len(seeds) if len(labels) == 1 else labels
        if not seeds or len(seeds) != len(labels):
            raise ValueError(f"{len(seeds)} seeds for {len(labels)} labels or prompts: one each")
        precision, in_fp32 = ("fp32", {}) if self.transformer.dtype == torch.float32 else ("bf16", {"fp32": "off"})
        routes = tuple(Route(**{**route, **in_fp32}) for route in self.config.routes or ())
        model = Model(process, self.transformer, routes, text)
        how = (min(batch_size, len(seeds)), precision, guide, Churn(churn) if churn else None)
        sampler = Sampler.of(process, num_inference_steps, solver, *how)
        levels = process.schedule(sampler.steps).tolist()
        bar = self.progress_bar(total=-(-len(seeds) // sampler.batch_size) * sampler.steps)

        def after_step(step: int, x: Tensor) -> Tensor:
            bar.update()
            if callback_on_step_end is None:
                return x
            given = {"latents": x} if "latents" in callback_on_step_end_tensor_inputs else {}
            return (callback_on_step_end(self, step, levels[step], given) or {}).get("latents", x)

        with bar:
            drawn = draw(model, seeds, torch.tensor(labels), sampler, noise=noise, after_step=after_step)
            decode = partial(from_network, latents=self.latents) if output_type == "latent" else self._decode
            images = in_form(output_type, torch.cat([to_pictures(x, decode, min(16, len(x))) for x in drawn]))
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _check_trained_for(self, guide: Guidance) -> None:
        row = KINDS[guide.kind]
        if row.weak_class is False and not self.config.label_drop:
            raise ValueError(f"guidance={guide.kind} draws with no class, which this network was never trained to do")
        returns = self.transformer.skipped_return or self.transformer.drops_path
        if row.routed and not (self.config.routes and returns):
            raise ValueError(f"guidance={guide.kind} leaves tokens out, which this network was not trained for")
        if row.drops_path and not self.config.path_drop:
            raise ValueError(f"guidance={guide.kind} leaves out SPRINT's sparse part, which training never did")

    def _conditions(self, classes: object, prompt: object, place: str | None) -> tuple[list[int], object]:
        """Return labels, and the encoded prompts that they index (None if the network was trained on classes). `place`
        is the text encoder's hub id or folder; None: the text encoder used in training."""
        if self.config.text is None:
            if prompt is not None or classes is None:
                raise ValueError("this network was trained with classes: class_labels=[0, 1] names them")
            classes = classes if hasattr(classes, "__len__") and not isinstance(classes, str) else [classes]
            numbers = [class_number(label, self.latents.classes) for label in classes]
            return class_labels(numbers, self.transformer.num_classes, self.config.label_drop), None
        if prompt is None or classes is not None:
            raise ValueError("this network was trained with captions: prompt='…' says what to draw")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        spec = TextSpec(**{k: tuple(v) if isinstance(v, list) else v for k, v in self.config.text.items()})
        return list(range(len(prompts))), encoder_for(spec, self.transformer.device, place).encode(prompts)

    def _noise(self, generator: object, seeds: object, count: int) -> tuple[Tensor | None, list[int]]:
        """Return (noise, seeds). A `generator` (one, or one per picture) draws both: noise (n, C, S, S) for n pictures,
        and seeds for other random numbers. Without one, noise is None: draw() makes it from `seeds` (None: random)."""
        if generator is None:
            seeds = torch.randint(2**31, (count,)).tolist() if seeds is None else seeds
            return None, [operator.index(seed) for seed in (seeds if hasattr(seeds, "__len__") else [seeds])]
        if seeds is not None:
            raise ValueError("seeds and generator are both given: noise is drawn from one of them")
        network, several = self.transformer, not isinstance(generator, torch.Generator)
        generators = list(generator) if several else [generator]
        count = len(generators) if several and count == 1 else count
        if several and len(generators) != count:
            raise ValueError(f"{len(generators)} generators for {count} labels or prompts: one each")
        shape = (count, network.in_channels, network.input_size, network.input_size)
        noise = randn_tensor(shape, generators if several else generator, network.device, torch.float32)
        drawers = generators if several else generators * count
        return noise, [int(torch.randint(2**31, (), generator=one, device=one.device)) for one in drawers]

    def _decode(self, x: Tensor) -> Tensor:
        z = from_network(x, self.latents)
        if self.latents.autoencoder == "pixels":
            return to_uint8(z)
        if self.vae is None:
            kind = diffusers.AutoencoderKL.load_config(self.config.autoencoder)["_class_name"]
            self.register_modules(vae=getattr(diffusers, kind).from_pretrained(self.config.autoencoder).to(x.device))
        with exact():
            return to_uint8(decoded(self.vae, z.to(self.vae.dtype)))
