"""What settings are called elsewhere (diffusers, timm, Lightning, the code of DiT, SiT and EDM), and what here.

A name of other code is never taken, for it may mean something else there: the error names ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Our keys, of which a script has one or none (-: there is none): names elsewhere; what to know beside the name.
# The first entry that holds a name and a key of the script counts.
_TABLE = """
train.steps: epochs max_epochs num_epochs num_train_epochs n_epochs n_epoch; optimizer steps, not epochs; an epoch has
    (number of images) / train.batch_size of them
train.steps: total_kimg kimg duration total_nimg; optimizer steps, not images; each takes train.batch_size of them
train.steps steps: steps max_steps num_steps n_steps total_steps train_steps max_train_steps training_steps
    num_train_steps iterations iters num_iterations num_iters max_iter max_iters niter n_iter total_iterations
sampling.steps steps: num_sampling_steps sampling_steps num_inference_steps inference_steps sample_steps ddim_steps
    diffusion_steps nfe
train.micro_batch_size: gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps
    accumulate_grad_batches accum_iter accumulation_steps num_accumulation_rounds; images a process takes at once;
    accumulation follows from it and train.batch_size
train.micro_batch_size batch_size: micro_batch micro_batch_size microbatch batch_gpu device_batch_size
    per_device_batch_size per_gpu_batch_size per_device_train_batch_size
eval.batch_size batch_size: eval_batch_size val_batch_size per_device_eval_batch_size
train.batch_size batch_size eval.batch_size: bs batch batch_size batchsize global_batch_size global_batch
    train_batch_size total_batch_size effective_batch_size per_proc_batch_size sample_batch_size max_batch_size
workers: num_workers workers n_workers nworkers dataloader_num_workers data_loader_workers
-: num_workers workers n_workers nworkers dataloader_num_workers data_loader_workers pin_memory pin_mem prefetch_factor;
    there is nothing to set, reading ahead needs no processes of its own
optim.lr: lr learning_rate learningrate base_lr max_lr peak_lr blr init_lr
optim.schedule solver: lr_scheduler lr_scheduler_type lr_schedule sched scheduler schedule
optim.warmup_steps: warmup warmup_steps lr_warmup lr_warmup_steps num_warmup_steps warmup_iters warmup_epochs
    lr_rampup_kimg lr_rampup; counted in optimizer steps
optim.final_lr: min_lr lr_min eta_min lr_end final_lr
optim.weight_decay: weight_decay wd adam_weight_decay adamw_weight_decay
optim.betas: betas adam_betas beta1 beta2 adam_beta1 adam_beta2 opt_betas; e.g. optim.betas=[0.9,0.999]
optim.eps: adam_epsilon adam_eps epsilon opt_eps
optim.clip_norm: clip clip_grad clip_grad_norm clip_norm grad_clip grad_clip_norm grad_norm_clip gradient_clip
    gradient_clipping gradient_clip_val max_grad_norm max_norm
optim.name: optimizer opt optim_type; adamw or sgd, whose numbers are optim.lr, optim.betas, …, optim.options
optim.options: momentum nesterov dampening amsgrad; e.g. with optim.name=sgd optim.options={momentum: 0.9}
model.depth: num_layers n_layers n_layer layers num_blocks blocks
model.hidden_size: hidden_dim embed_dim embedding_dim d_model n_embd dim width
model.num_heads: heads n_heads n_head nheads num_attention_heads attention_heads
model.patch_size: patch p patch_sz
model.routes.*.selection_ratio: mask_ratio drop_ratio route_ratio routing_ratio token_drop keep_ratio
model: arch architecture backbone model_name model_type net; a file of configs/model/
alignment.encoder: enc_type repa_encoder; with alignment=repa
alignment.weight: proj_coeff repa_weight align_weight
alignment.block: encoder_depth align_layer align_block; 0-based
train.precision precision: mixed_precision amp use_amp autocast bf16 fp16 fp32 half use_bf16 use_fp16 use_half
    weight_dtype torch_dtype tf32; auto, bf16 or fp32
train.compile compile: torch_compile use_compile compile_model
train.activation_checkpointing: gradient_checkpointing grad_checkpointing grad_checkpoint use_checkpoint
    activation_checkpoint checkpoint_activations
train.processes: num_gpus n_gpus ngpus gpus gpu devices num_processes nproc nproc_per_node world_size num_nodes nnodes;
    a check alone: accelerate launch --num_processes, or torchrun, starts them
train.cpu_threads: num_threads threads n_threads
device: gpu gpu_id cuda
-: device gpu gpu_id cuda; there is nothing to set: a GPU is taken where there is one (CUDA_VISIBLE_DEVICES)
ema.decay: ema_decay ema_rate ema_beta ema_max_decay ema_halflife_kimg ema_momentum
weights ema.decay: use_ema ema
every.log: log_every log_interval log_freq log_steps logging_steps log_every_n_steps print_freq print_every tick
every.save: save_every save_interval save_freq save_steps ckpt_every ckpt_interval checkpoint_every checkpoint_interval
    checkpointing_steps snap state_dump_ticks every_n_train_steps
every.evaluate: eval_every eval_interval eval_freq eval_steps evaluate_every val_every val_interval validation_steps
    validate_every val_check_interval check_val_every_n_epoch
every.sample: sample_every sample_interval sample_freq visualize_every image_every snapshot_ticks
checkpoints.keep_last: save_total_limit checkpoints_total_limit save_top_k max_checkpoints max_to_keep keep_checkpoints
resume: resume_from resume_from_checkpoint resume_ckpt resume_path resume_run resume_training auto_resume; a run goes on
    when its command is given again; init_from=… starts another from weights
checkpoint weights init_from run: ckpt ckpt_path checkpoint checkpoint_path pretrained pretrained_path pretrained_model
    load load_from load_path finetune finetune_from init_checkpoint init_ckpt transfer pretrained_model_name_or_path
    model_path network network_pkl restore_from weights_path
dataset.path source samples data: data data_path data_dir data_root datadir dataset_path dataset_dir train_data_dir
    train_dir train_path root_dir feature_path latents latents_path input input_dir input_path images image_dir
    image_folder src folder path
dataset.heldout: val_data_dir val_dir val_path test_dir validation_path
resolution dataset.size crop: image_size img_size input_size resolution res size latent_size image_resolution
dataset.num_classes num_classes: num_classes nb_classes n_classes nclasses class_num label_dim
dataset.channels: in_channels num_channels in_chans latent_channels
train.label_drop: class_dropout_prob class_drop_prob label_dropout label_dropout_prob cfg_dropout cond_drop_prob
    uncond_prob p_uncond unconditional_prob cfg_prob
autoencoder sampling.autoencoder: vae vae_path vae_model ae first_stage pretrained_vae vae_type
scale: vae_scale scaling_factor scale_factor vae_scaling_factor latent_scale
flip flipped: xflip hflip horizontal_flip random_flip mirror
out results: output_dir output outdir out_dir output_path out_path outfile save_dir save_path sample_dir dest dst o
results out: results_dir logdir log_dir logging_dir workdir work_dir default_root_dir run_dir project_dir out
name: exp_name experiment_name exp run_name exp_id desc expname job_name tag
tracker: use_wandb enable_wandb log_wandb wandb_mode report_to logger log_with
wandb.project: wandb_project project project_name tracker_project_name wandb_name
guidance.scale: cfg_scale cfg guidance_scale guidance_weight omega cfg_weight w unconditional_guidance_scale; with
    guidance=cfg
guidance.interval: guidance_interval interval_guidance t_range guidance_low guidance_high
sampling.solver solver: sampler sampling_method sampler_type ode_solver method sampler_name
churn: s_churn churn_amount sde
num_samples eval.fid_samples: num_fid_samples fid_num_samples num_samples n_samples num_images n_images nsamples
    samples_count fid_samples count
seeds: num_fid_samples fid_num_samples num_samples n_samples num_images n_images nsamples samples_count fid_samples
    count; a picture for each class and seed, e.g. seeds=0-15
seed first_seed seeds: seed global_seed start_seed random_seed manual_seed seeds
classes: class_labels class_label class_cond class_idx class_ids class_names labels label y class
reference eval.fid_reference: ref ref_path ref_batch ref_stats fid_ref fid_stats fid_reference stats reference_path
    gt_path
objective: loss_type path_type prediction prediction_type pred_type parameterization diffusion framework precond
"""


def ours(key: str, known: Sequence[str]) -> str | None:
    """What to say of a dotted key that is not known here, if others know it so; else None."""
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    if section and any(other.rpartition(".")[2] == name for other in known):
        return None  # our own name in a section that is misspelt
    for line in re.split(r"\n(?! )", _TABLE.strip()):
        keys, names, note = re.fullmatch(r"([^:]+): ([^;]+);? ?(.*)", " ".join(line.split())).groups()
        if name not in names.split():
            continue
        if keys == "-":
            return note
        if heirs := [heir for heir in keys.split() if heir in known]:
            nearest = next((heir for heir in heirs if heir.rpartition(".")[0] == section), heirs[0])
            return f"here it is {nearest!r}" + (note and f": {note}")
    return None
