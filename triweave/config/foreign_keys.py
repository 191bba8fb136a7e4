"""The one table of other tools' keys. The loader answers from it, and the reference page prints it.

Names are written with underscores; dashes in a file or on a command line are read as underscores.
"""

from __future__ import annotations

from triweave.config import arithmetic
from triweave.config.foreign import Foreign
from triweave.config.foreign_layout import LAYOUT

TABLE: tuple[Foreign, ...] = (
    # --- Batch
    Foreign(
        "layout.micro_batch",
        "per_device_train_batch_size (HF Trainer, TRL and LLaMA-Factory), micro_batch_size (Axolotl, Megatron-LM, "
        "litgpt and nanotron), local_batch_size (torchtitan and AutoModel), device_train_microbatch_size (llm-foundry)",
        "sequences a rank computes at once",
    ),
    Foreign(
        "layout.micro_batch",
        "batch_size (torchtune, litgpt and others)",
        "the word means two things: sequences a rank computes at once are layout.micro_batch, sequences of a whole "
        "optimizer step are train.global_batch",
    ),
    Foreign(
        "train.global_batch",
        "gradient_accumulation_steps (HF Trainer, TRL, Axolotl, LLaMA-Factory and torchtune), "
        "batch_accumulation_per_replica (nanotron), accumulate_grad_batches (Lightning)",
        "accumulation follows from it",
        work=arithmetic.accumulated_batch,
    ),
    Foreign(
        "train.global_batch",
        "global_batch_size (Megatron-LM, litgpt, AutoModel and torchtitan), global_train_batch_size (llm-foundry), "
        "train_batch_size (DeepSpeed)",
        "sequences of one optimizer step, over all data-parallel ranks",
    ),
    Foreign(
        "train.global_batch",
        "num_tokens_per_train_step (torchtitan)",
        "in sequences",
        work=arithmetic.tokens_to_sequences,
    ),
    Foreign(
        None,
        "per_device_eval_batch_size (HF Trainer, TRL and LLaMA-Factory), eval_batch_size (Axolotl)",
        "held-out data runs with layout.micro_batch",
    ),
    # --- Sequences
    Foreign(
        "data.seq_len",
        "max_seq_length (TRL and litgpt), max_length (TRL and ms-swift), max_seq_len (torchtune and llm-foundry), "
        "sequence_len (Axolotl), cutoff_len (LLaMA-Factory), seq_length (Megatron-LM and AutoModel), sequence_length "
        "(nanotron), max_context_length (torchtitan), model_max_length (HF tokenizers), block_size (nanoGPT and HF "
        "examples), packed_sequence_size (AutoModel)",
        "tokens of one training sequence; elsewhere the word is where an example is cut, here data.too_long says that",
    ),
    Foreign(
        "data.packing",
        "sample_packing (Axolotl), neat_packing (LLaMA-Factory), padding_free (TRL and ms-swift), packed (torchtune)",
        "attention and positions always stay inside each example",
        {True: "true", False: "false"},
    ),
    Foreign(
        "data.too_long",
        "excess_length_strategy (Axolotl), truncation_strategy (ms-swift)",
        values={"drop": "drop", "truncate": "truncate", "raise": "error", "delete": "drop"},
    ),
    # --- Learning rate and optimizer
    Foreign(
        "optimizer.learning_rate",
        "lr (Megatron-LM, torchtune, torchtitan and litgpt), max_lr (Megatron-Bridge), base_lr (Composer)",
        "the peak",
    ),
    Foreign(
        "optimizer.min_learning_rate",
        "min_lr (Megatron-LM, litgpt and AutoModel), min_decay_lr (nanotron)",
        "the learning rate itself, not a share of the peak",
    ),
    Foreign(
        "optimizer.min_learning_rate",
        "cosine_min_lr_ratio (Axolotl), min_lr_factor (torchtitan), min_lr_ratio (HF Trainer), min_lr_rate (HF "
        "Trainer), alpha_f (llm-foundry)",
        "the learning rate itself, not a share of the peak",
        work=arithmetic.share_of_learning_rate,
    ),
    Foreign(
        "optimizer.lr_schedule",
        "lr_scheduler_type (HF Trainer, TRL and LLaMA-Factory), lr_scheduler (Axolotl and torchtune), lr_decay_style "
        "(Megatron-LM, ms-swift and nanotron), decay_type (torchtitan)",
        "cosine, linear or constant",
        {name: name for name in ("cosine", "linear", "constant")} | {"constant_with_warmup": "constant"},
    ),
    Foreign(
        "optimizer.warmup_steps",
        "num_warmup_steps (torchtune and HF), lr_warmup_steps (litgpt, AutoModel and nanotron), lr_warmup_iters "
        "(Megatron-LM), warmup_iters (nanoGPT)",
        "optimizer steps",
    ),
    Foreign(
        "optimizer.warmup_steps", "lr_warmup_samples (Megatron-LM)", "optimizer steps", work=arithmetic.samples_to_steps
    ),
    Foreign("optimizer.warmup_ratio", "lr_warmup_fraction (Megatron-LM and ms-swift)", "share of the whole run"),
    Foreign(
        None,
        "lr_decay_iters (Megatron-LM and nanoGPT), lr_decay_steps (nanotron and AutoModel), decay_ratio (torchtitan)",
        "the decay lasts from the end of the warm-up to the last step",
    ),
    Foreign(
        "optimizer.betas",
        "adam_beta1 (HF Trainer, Axolotl and Megatron-LM), adam_beta2 (HF Trainer, Axolotl and Megatron-LM), beta1 "
        "(torchtitan and nanoGPT), beta2 (torchtitan and nanoGPT)",
        "a list of both",
        work=arithmetic.both_betas,
    ),
    Foreign(
        "optimizer.moments",
        "exp_avg_dtype (Megatron-LM), exp_avg_sq_dtype (Megatron-LM), bf16_optimizer_states (DeepSpeed)",
        "both moments at once, float32 or bfloat16; masters stay float32",
        {"fp32": "float32", "bf16": "bfloat16", True: "bfloat16", False: "float32"},
    ),
    Foreign("optimizer.eps", "adam_epsilon (HF Trainer and Axolotl), adam_eps (Megatron-LM and nanotron)"),
    Foreign(
        "optimizer.max_grad_norm",
        "clip_grad (Megatron-LM and nanotron), clip_grad_norm (torchtune), gradient_clipping (DeepSpeed), "
        "gradient_clip_val (Lightning), grad_clip (nanoGPT), max_norm (torchtitan and litgpt), clipping_threshold "
        "(llm-foundry)",
    ),
    Foreign(None, "optim (HF Trainer and LLaMA-Factory)", "it is AdamW with float32 master weights"),
    # --- Length of the run
    Foreign(
        "train.epochs",
        "num_train_epochs (HF Trainer, TRL and LLaMA-Factory), num_epochs (Axolotl and AutoModel), max_epochs "
        "(Lightning and ms-swift)",
        "or train.steps, not both",
    ),
    Foreign(
        "train.steps",
        "max_steps (HF Trainer, TRL, Axolotl and litgpt), train_iters (Megatron-LM), max_iters (nanoGPT), train_steps "
        "(nanotron), max_steps_per_epoch (torchtune)",
        "optimizer steps of the whole run; or train.epochs, not both",
    ),
    Foreign("train.steps", "train_samples (Megatron-LM)", "optimizer steps", work=arithmetic.samples_to_steps),
    Foreign("train.steps", "max_tokens (litgpt)", "optimizer steps", work=arithmetic.tokens_to_steps),
    Foreign(
        "train.epochs",
        "max_duration (llm-foundry)",
        "2ep is train.epochs: 2, 100ba is train.steps: 100",
        work=arithmetic.duration,
    ),
    *LAYOUT,
    # --- Model
    Foreign(
        "model.path",
        "base_model (Axolotl), model_name_or_path (HF Trainer, TRL and LLaMA-Factory), pretrained_model_name_or_path "
        "(AutoModel and HF), model_name (Unsloth and others), checkpoint_dir (torchtune and litgpt), hf_assets_path "
        "(torchtitan), initial_load_path (torchtitan), pretrained_checkpoint (Megatron-Bridge and Megatron-LM)",
        "a Hugging Face folder on disk: config.json, safetensors weights, tokenizer.json",
    ),
    Foreign(
        "model.dtype",
        "bf16 (HF Trainer, Axolotl, LLaMA-Factory and Megatron-LM), fp16 (HF Trainer, Axolotl, LLaMA-Factory and "
        "Megatron-LM), pure_bf16 (LLaMA-Factory), torch_dtype (HF, ms-swift and AutoModel), precision (litgpt and "
        "llm-foundry), mixed_precision (accelerate), mixed_precision_param (torchtitan)",
        "bfloat16 or float32; master weights are float32 always",
        {True: "bfloat16"} | dict.fromkeys(("bf16", "bf16-mixed", "auto", "bfloat16"), "bfloat16"),
    ),
    Foreign(
        "model.attention",
        "attn_implementation (HF, TRL and Axolotl), flash_attention (Axolotl), flash_attn (LLaMA-Factory), "
        "sdp_attention (Axolotl), use_flash_attn (Megatron-LM), attention_backend (Megatron-LM and ms-swift)",
        "auto takes the fastest kernel of this machine",
        {"flash_attention_2": "flash", "fa2": "flash", "sdpa": "auto", "auto": "auto", "eager": "math"},
    ),
    Foreign(
        None,
        "adapter (Axolotl), finetuning_type (LLaMA-Factory), train_type (ms-swift), use_peft (TRL), lora_r (Axolotl "
        "and TRL), lora_rank (LLaMA-Factory and ms-swift), lora_alpha (Axolotl, TRL and LLaMA-Factory), load_in_4bit "
        "(Axolotl and TRL), load_in_8bit (Axolotl and TRL), quantization_bit (LLaMA-Factory)",
        "every weight is trained, at full precision",
    ),
    Foreign(None, "trust_remote_code (HF)", "code from a model folder is never run"),
    Foreign(None, "torch_compile (HF Trainer and Axolotl), compile (torchtune and torchtitan)", "leave it out"),
    # --- Data
    Foreign(
        "data.train",
        "datasets (Axolotl), dataset (LLaMA-Factory and ms-swift), dataset_name (TRL and HF examples), dataset_path "
        "(Unsloth), dataset_dir (LLaMA-Factory), path_or_dataset (AutoModel), train_file (HF examples), data_path "
        "(Megatron-LM and torchtitan), train_data_path (Megatron-LM), dataset_folder (nanotron)",
        "files (.jsonl, .json, .parquet, .txt) or folders of them",
    ),
    Foreign(
        "data.validation",
        "val_set_size (Axolotl), val_size (LLaMA-Factory), split_dataset_ratio (ms-swift), val_split_fraction "
        "(litgpt), eval_dataset (LLaMA-Factory and TRL), test_datasets (Axolotl), dataset_val (torchtune), "
        "validation_dataset (AutoModel), validation_file (HF examples), valid_data_path (Megatron-LM), split "
        "(Megatron-LM)",
        "a share of the examples below 1, or a path; a number of examples is divided by all of them",
    ),
    Foreign("data.format", "formatting (LLaMA-Factory)", values={"alpaca": "alpaca", "sharegpt": "sharegpt"}),
    Foreign(
        "data.loss_on",
        "train_on_inputs (Axolotl), train_on_input (torchtune), train_on_prompt (LLaMA-Factory)",
        "true is all, false is assistant",
        {True: "all", False: "assistant"},
    ),
    Foreign(
        "data.loss_on",
        "assistant_only_loss (TRL), answer_only_loss (Megatron-Bridge), mask_prompt (litgpt)",
        "true is assistant, false is all",
        {True: "assistant", False: "all"},
    ),
    Foreign(
        "data.loss_on",
        "completion_only_loss (TRL), mask_history (LLaMA-Factory)",
        "true is completion, the last reply only",
        {True: "completion"},
    ),
    Foreign("data.loss_on", "roles_to_train (Axolotl)", "assistant, completion (the last reply only) or all"),
    Foreign(
        "data.chat_template",
        "template (LLaMA-Factory and ms-swift), chat_template_path (TRL), chat_template_jinja (Axolotl), "
        "prompt_template (torchtune), prompt_style (litgpt)",
        "a file with a Jinja template; left out, the tokenizer's own",
    ),
    Foreign(
        "data.tokenizer",
        "tokenizer_name_or_path (nanotron and HF), tokenizer_name (HF examples and llm-foundry), tokenizer_path "
        "(torchtitan), tokenizer_model (Megatron-LM), tokenizer_config (Axolotl)",
        "a folder with tokenizer.json; left out, model.path",
    ),
    Foreign(
        None,
        "dataloader_num_workers (HF Trainer and ms-swift), preprocessing_num_workers (LLaMA-Factory), dataset_num_proc "
        "(TRL, Axolotl and ms-swift), num_workers (Megatron-LM, torchtitan and litgpt)",
        "data is prepared before the first step",
    ),
    # --- Output
    Foreign(
        "output_dir",
        "out_dir (litgpt and nanoGPT), dump_folder (torchtitan), save (Megatron-LM), save_folder (llm-foundry), "
        "checkpoints_path (nanotron)",
        "checkpoints are in its folder checkpoints",
    ),
    Foreign(
        "checkpoint.every_steps",
        "save_steps (HF Trainer, TRL, Axolotl and LLaMA-Factory), save_interval (Megatron-LM and litgpt), "
        "save_every_n_steps (torchtune), ckpt_every_steps (AutoModel), checkpoint_interval (nanotron), interval "
        "(torchtitan), saves_per_epoch (Axolotl), save_strategy (HF Trainer, TRL and Axolotl)",
        "optimizer steps; 0 saves only the last",
    ),
    Foreign("checkpoint.keep", "save_total_limit (HF Trainer, TRL and Axolotl), keep_latest_k (torchtitan)"),
    Foreign(
        "validation.every_steps",
        "eval_steps (HF Trainer, TRL, Axolotl and LLaMA-Factory), eval_interval (Megatron-LM and llm-foundry), "
        "run_val_every_n_steps (torchtune), val_every_steps (AutoModel), val_check_interval (nanotron and Lightning), "
        "evals_per_epoch (Axolotl), eval_strategy (HF Trainer, TRL and Axolotl), evaluation_strategy (HF Trainer), "
        "freq (torchtitan)",
        "optimizer steps; 0 measures at the start and the end",
    ),
    Foreign("validation.max_batches", "eval_iters (Megatron-LM), limit_val_batches (nanotron and Lightning)"),
    Foreign(
        "log.every_steps",
        "logging_steps (HF Trainer, TRL, Axolotl and LLaMA-Factory), log_interval (Megatron-LM, litgpt and nanoGPT), "
        "log_every_n_steps (torchtune and Lightning), log_freq (torchtitan), iteration_step_info_interval (nanotron)",
        "lines on the terminal; metrics.jsonl has every step",
    ),
    Foreign(
        "log.to",
        "report_to (HF Trainer, TRL, LLaMA-Factory and ms-swift), logger_name (litgpt), enable_tensorboard "
        "(torchtitan), tensorboard_dir (Megatron-LM), enable_wandb (torchtitan), wandb_project (Axolotl and "
        "Megatron-LM)",
        "[tensorboard] or []; metrics.jsonl is always written",
        {"tensorboard": "[tensorboard]", "none": "[]", True: "[tensorboard]", False: "[]"},
    ),
    Foreign(
        "resume",
        "resume_from_checkpoint (HF Trainer, TRL, Axolotl, LLaMA-Factory and torchtune), auto_resume_from_checkpoints "
        "(Axolotl), load (Megatron-LM), load_step (torchtitan), resume_checkpoint_path (nanotron)",
        "auto (the newest checkpoint in output_dir), never, or the path of one",
        {True: "auto", False: "never", -1: "auto"},
    ),
    Foreign("seed", "data_seed (HF Trainer)", "of data order and random weights"),
    # --- Processes
    Foreign(
        "runtime.timeout_s",
        "ddp_timeout (HF Trainer, Axolotl and LLaMA-Factory), train_timeout_seconds (torchtitan), init_timeout_seconds "
        "(torchtitan)",
        "seconds",
    ),
    Foreign(
        "runtime.timeout_s",
        "distributed_timeout_minutes (Megatron-LM), timeout_minutes (AutoModel)",
        "seconds",
        work=arithmetic.minutes_to_seconds,
    ),
)
