"""Names of settings in other codebases (diffusers, timm, Lightning, DiT, SiT, EDM), and ours for the same settings.

They are used in error messages only: another codebase's name is not accepted, as its meaning may differ."""

from collections.abc import Sequence

# Our keys (a script may know only some) | names elsewhere | a note for the message. Of the rows that hold the foreign
# name and a key known to the script, the first with a key in the foreign name's section is used, else the first.
_TABLE = """
train.steps | epochs max_epochs num_epochs num_train_epochs | optimizer steps, not epochs
train.steps | total_kimg kimg duration | optimizer steps, not images
train.steps steps | max_steps num_steps total_steps train_steps max_train_steps iterations iters max_iters
sampling.steps steps | num_sampling_steps sampling_steps num_inference_steps ddim_steps nfe
train.micro_batch_size | gradient_accumulation_steps grad_accum accum_iter | images that a process takes at once
train.micro_batch_size batch_size | micro_batch_size batch_gpu per_gpu_batch_size per_device_train_batch_size
train.batch_size batch_size eval.batch_size | bs batch batch_size global_batch_size train_batch_size per_proc_batch_size
optim.lr | lr learning_rate base_lr max_lr
optim.schedule | lr_scheduler lr_schedule sched scheduler
optim.warmup_steps | warmup lr_warmup_steps num_warmup_steps warmup_epochs | counted in optimizer steps
optim.betas | betas adam_betas beta1 beta2 adam_beta1 adam_beta2 | e.g. optim.betas=[0.9,0.999]
optim.clip_norm | clip_grad grad_clip clip_grad_norm gradient_clip_val max_grad_norm
model.depth | num_layers n_layers layers num_blocks
model.hidden_size | hidden_dim embed_dim d_model n_embd dim width
model.num_heads | heads n_heads n_head num_attention_heads
model.routes.*.selection_ratio | mask_ratio drop_ratio route_ratio keep_ratio
model | arch architecture backbone model_name model_type | a file of configs/model/
train.precision precision | precision mixed_precision amp bf16 fp16 fp32 dtype tf32 | auto, bf16 or fp32
train.memory | gradient_checkpointing grad_checkpointing use_checkpoint | checkpointing recomputes blocks
every.log | log_every log_interval log_steps logging_steps print_freq
every.save | save_every save_interval save_steps ckpt_every checkpoint_every checkpointing_steps snap checkpoint
every.evaluate | eval_every eval_interval eval_freq eval_steps val_check_interval
resume | resume_from resume_from_checkpoint resume_path auto_resume | running the same command again resumes its run
checkpoint weights init_from run | ckpt ckpt_path checkpoint checkpoint_path pretrained load_from model_path network
dataset.path source samples data | data data_path data_dir data_root dataset_path train_data_dir feature_path images
resolution dataset.size crop | image_size img_size input_size resolution latent_size
train.label_drop | class_dropout_prob label_dropout cfg_dropout cond_drop_prob
out results | out output outdir output_dir out_dir save_dir sample_dir results_dir logdir log_dir work_dir
guidance.scale | cfg_scale cfg guidance_scale omega | with guidance=cfg
sampling.solver solver | solver sampler sampling_method ode_solver
num_samples eval.fid_samples seeds | num_fid_samples num_samples n_samples num_images
reference eval.fid_reference | ref ref_path ref_batch fid_stats
objective | loss_type path_type prediction prediction_type parameterization precond
"""


def ours(key: str, known: Sequence[str]) -> str | None:
    """Return a hint, e.g. "here it is 'optim.lr'", if `key` is a foreign name for a key in `known`, else None."""
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    if section and any(other.rpartition(".")[2] == name for other in known):
        return None  # our own name under a misspelt section
    found = []  # pairs of our key and the notes on it
    for line in _TABLE.strip().splitlines():
        keys, names, *notes = line.split(" | ")
        found += [(other, notes) for other in keys.split() if name in names.split() and other in known]
    if not found:
        return None
    nearest, notes = next((pair for pair in found if pair[0].rpartition(".")[0] == section), found[0])
    return ": ".join([f"here it is {nearest!r}", *notes])
