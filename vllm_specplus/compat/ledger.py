"""The ledger: every name of vLLM that the plugin touches, with the reason."""

from dataclasses import dataclass

TESTED_VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True)
class Seam:
    """One name of vLLM that the plugin overrides, subclasses, calls or reads.

    Attributes:
        module: vLLM's module, as imported.
        name: a name of that module, or ``Class.member`` for a method or an annotated field of a class.
        why: what the plugin does with it.
        parameters: parameters of the function that the plugin passes by name, or takes by name in its place.
        is_exact: the function has these parameters alone, in this order, since the plugin's own takes its place or
            the plugin passes them by position.
        may_be_gone: a release without the name offers no configuration that needs it.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    is_exact: bool = False
    may_be_gone: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


_V1 = "vllm.v1.worker.gpu_model_runner"
_BASE = "vllm.v1.spec_decode.llm_base_proposer"
_REJECTION = "vllm.v1.sample.rejection_sampler"
_PROCESSORS = "vllm.v1.sample.logits_processor"
_SAMPLER = "vllm.v1.sample.sampler"
_V2 = "vllm.v1.worker.gpu.model_runner"
_V2_SPEC = "vllm.v1.worker.gpu.spec_decode"
_V2_STATES = "vllm.v1.worker.gpu.states"
_V2_SAMPLE = "vllm.v1.worker.gpu.sample"
_SCHED = "vllm.v1.core.sched"
_V2_SAMPLING_PARAMETERS = (
    "logits",
    "expanded_idx_mapping",
    "idx_mapping",
    "idx_mapping_np",
    "pos",
    "input_ids",
    "expanded_local_pos",
    "seq_lens_upper_bound_np",
)
_ENDPOINTS = "vllm.plugins.endpoint_plugins.interface"


def _members(module: str, owner: str, names: str, why: str) -> tuple[Seam, ...]:
    return tuple(Seam(module, f"{owner}.{name}", why) for name in names.split())


CONFIG_SEAMS = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        "the one permanent patch: builds the plugin's SpeculativeConfig and names its worker",
        ("target_model_config", "target_parallel_config"),
        is_exact=True,
    ),
    *_members(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "speculative_config spec_method spec_model spec_tokens",
        "read: the user's keys; set where another engine's keys are translated",
    ),
    *_members(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "distributed_executor_backend pipeline_parallel_size enable_dbo",
        "read: which model runner vLLM chooses",
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.watermark_config",
        "read: the plugin's parts leave a watermark out",
    ),
    Seam(
        "vllm.config.model",
        "ModelConfig.use_fp64_gumbel",
        "read: the precision of the noise",
    ),
    Seam("vllm.config.model", "ModelConfig.hf_text_config", "read: whether a model has linear attention"),
    Seam("vllm.config.model", "ModelConfig.head_dtype", "read: the type of the kernels' logits"),
    Seam("vllm.distributed.parallel_state", "get_pp_group", "called: which stage drafts"),
    Seam("vllm.engine.arg_utils", "EngineArgs.async_scheduling", "turned off for host-side drafting"),
    Seam("vllm.config.speculative", "SpeculativeConfig", "subclassed"),
    Seam("vllm.config.utils", "config", "called: makes the subclass one of vLLM's configs"),
    *(
        Seam("vllm.config.speculative", name, "read from the source: the methods that vLLM knows")
        for name in ("SpeculativeMethod", "MTPModelTypes")
    ),
    Seam("vllm.config.speculative", "SpeculativeConfig.__post_init__", "extended: it sees the model's steps alone"),
    *_members(
        "vllm.config.speculative",
        "SpeculativeConfig",
        "num_speculative_tokens method model parallel_drafting target_model_config target_parallel_config "
        "use_multi_module_mtp",
        "read and set",
    ),
    *_members(
        "vllm.config.speculative",
        "SpeculativeConfig",
        "prompt_lookup_min prompt_lookup_max num_speculative_tokens_per_batch_size",
        "set: a method without a model runs on V2 under another name",
    ),
    *_members("vllm.config.scheduler", "SchedulerConfig", "max_num_seqs async_scheduling", "read"),
    Seam("vllm.config.parallel", "ParallelConfig.worker_cls", "set to the plugin's worker"),
    Seam("vllm.config.parallel", "ParallelConfig.tensor_parallel_size", "read: how many workers share the memory"),
    Seam(
        "vllm.config.parallel",
        "ParallelConfig.enable_batch_sharded_sampling",
        "read: no plugin drafts with it on V2",
    ),
    Seam("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER", "read: which model runner vLLM chooses"),
    Seam("vllm.triton_utils", "HAS_TRITON", "read: which model runner vLLM chooses"),
    Seam("vllm.platforms", "current_platform", "read: which worker to extend"),
    Seam("vllm.platforms.interface", "Platform.device_type", "read: which worker to extend"),
    Seam("vllm.logger", "init_logger", "called: log lines in vLLM's own form"),
)

SCHEDULER_SEAMS = (
    Seam("vllm.config", "VllmConfig", "read: whether scheduling is asynchronous"),
    *_members("vllm.engine.arg_utils", "EngineArgs", "scheduler_cls max_num_seqs", "read, and the first set"),
    *_members("vllm.config.scheduler", "SchedulerConfig", "scheduler_cls get_scheduler_cls", "builds our scheduler"),
    *_members(
        "vllm.config.parallel",
        "ParallelConfig",
        "data_parallel_size pipeline_parallel_size",
        "read: whether steps may have different widths",
    ),
    *_members(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "enable_lora enforce_eager optimization_level compilation_config attention_backend attention_config",
        "read: whether vLLM can trim drafts on the device",
    ),
    Seam("vllm.config.compilation", "CUDAGraphMode.has_full_cudagraphs", "called, for the same"),
    Seam("vllm.config.attention", "AttentionConfig.validate_backend_before", "called, for the same", ("value",)),
    Seam("vllm.v1.attention.backends.registry", "AttentionBackendEnum.get_class", "called, for the same"),
    Seam(f"{_SCHED}.async_scheduler", "AsyncScheduler", "subclassed: chooses how many slots a step has, tells salts"),
    Seam(f"{_SCHED}.scheduler", "Scheduler", "subclassed, and called: what runs with synchronous scheduling"),
    Seam(f"{_SCHED}.scheduler", "Scheduler.__init__", "extended", ("vllm_config",)),
    Seam(f"{_SCHED}.scheduler", "Scheduler.schedule", "extended: the width is chosen before each step"),
    Seam(
        f"{_SCHED}.scheduler",
        "Scheduler.update_from_output",
        "extended: learns from the accepted drafts",
        ("scheduler_output", "model_runner_output"),
        is_exact=True,
    ),
    Seam(
        f"{_SCHED}.scheduler",
        "Scheduler.add_request",
        "extended: the workers learn each request's salt",
        ("request",),
        is_exact=True,
    ),
    *_members("vllm.v1.request", "Request", "cache_salt sampling_params", "read; the second gets the first's digest"),
    Seam(f"{_SCHED}.scheduler", "Scheduler.dynamic_sd_lookup", "set: the width of the next step, by batch size"),
    *_members(f"{_SCHED}.scheduler", "Scheduler", "requests running", "read"),
    *_members("vllm.v1.request", "Request", "request_id is_prefill_chunk is_finished", "read"),
    Seam("vllm.v1.outputs", "ModelRunnerOutput.req_id_to_index", "read: the accepted drafts"),
    Seam(
        "vllm.v1.spec_decode.dynamic.utils",
        "build_dynamic_sd_schedule_lookup",
        "relied on: vLLM captures graphs for each width that it names",
        ("num_speculative_tokens_per_batch_size", "vllm_max_batch_size", "vllm_num_speculative_tokens"),
        is_exact=True,
    ),
)

REQUEST_SEAMS = (
    Seam("vllm.config.model", "ModelConfig.logits_processors", "extended by the class that checks requests"),
    *_members(
        "vllm.config.model",
        "ModelConfig",
        "get_vocab_size max_model_len return_sampling_mask skip_tokenizer_init tokenizer tokenizer_mode "
        "tokenizer_revision runner_type trust_remote_code",
        "read: limits that references are checked against, and their tokenizer",
    ),
    *(
        Seam(
            module,
            "LogitsProcessor.validate_params",
            "overridden: checks requests",
            ("sampling_params",),
        )
        for module in ("vllm.v1.sample.logits_processor.interface", f"{_V2_SAMPLE}.logits_processor.interface")
    ),
    *(
        Seam(
            f"vllm.entrypoints.openai.{kind}.protocol",
            f"{name}.to_sampling_params",
            "wrapped in a server: refuses fields that no middleware has read",
        )
        for kind, name in (("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest"))
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.add_request",
        "wrapped once a request asks for `aux_info`: notes the request",
        ("request", "prompt", "parent_req"),
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.process_outputs",
        "wrapped once a request asks for `aux_info`: counts its steps",
        ("engine_core_outputs",),
    ),
    Seam(_PROCESSORS, "LogitsProcessor", "subclassed by the class that checks requests"),
    Seam(f"{_V2_SAMPLE}.logits_processor", "LogitsProcessor", "subclassed by the class that checks requests"),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.validate_logits_processors_params",
        "calls the class that checks requests",
    ),
    Seam("vllm.sampling_params", "SamplingParams.extra_args", "read and set: a request's options"),
    *_members(
        "vllm.sampling_params",
        "SamplingParams",
        "eos_token_id stop_token_ids",
        "read: drafts that are chosen by what they earn end before these",
    ),
    Seam("vllm.sampling_params", "SamplingParams.__repr__", "wrapped: a log shows the lengths of references alone"),
    Seam(
        "vllm.logging_utils.dump_input",
        "prepare_object_to_dump",
        "called: shows a step when an engine dies; asks `SchedulerOutput` for the plugin's `anon_repr`",
        ("obj",),
    ),
    Seam(
        f"{_SCHED}.output",
        "SchedulerOutput.scheduled_spec_decode_tokens",
        "read: the drafts of a step; a log shows their number alone",
    ),
    Seam("vllm.exceptions", "VLLMValidationError", "raised where a request is refused"),
    *(
        Seam(
            f"vllm.entrypoints.openai.{kind}.serving",
            "logger",
            "read: the logger whose tracebacks of refused streams are shortened",
        )
        for kind in ("chat_completion", "completion")
    ),
    Seam("vllm.envs", "VLLM_USE_RUST_FRONTEND", "read: whether requests pass the check"),
    Seam("vllm.envs", "VLLM_API_KEY", "read: whether vLLM is going to refuse a request"),
    Seam("vllm.entrypoints.serve.middleware.authenticate", "GUARDED_PREFIX", "read: routes that ask for an API key"),
    Seam(
        "vllm.entrypoints.serve.middleware.authenticate",
        "AuthenticationMiddleware.verify_token",
        "called: whether vLLM is going to refuse a request, and whether the plugin's routes do",
    ),
    Seam("vllm.tokenizers", "get_tokenizer", "called: the tokenizer of references"),
    Seam("vllm.tokenizers.protocol", "TokenizerLike.max_chars_per_token", "read: how much of a reference is tokenised"),
    Seam(
        "vllm.tokenizers.protocol",
        "TokenizerLike.encode",
        "called: tokens of references",
        ("text", "add_special_tokens"),
    ),
    *_members(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "scheduled_new_reqs finished_req_ids preempted_req_ids scheduled_spec_decode_tokens num_invalid_spec_tokens",
        "read: requests that begin and end, and the drafts to verify",
    ),
    *_members(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens",
        "read: the tokens of a step, whose time is taken",
    ),
    *_members("vllm.v1.core.sched.output", "NewRequestData", "req_id sampling_params", "read: a request's options"),
    *_members("vllm.v1.outputs", "ModelRunnerOutput", "req_ids sampled_token_ids", "read: the accepted drafts"),
    Seam("vllm.distributed.parallel_state", "get_tp_group", "called: one of several workers logs and sets the prices"),
    Seam(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.broadcast_object",
        "called: the first worker's prices go to the others",
        ("obj",),
    ),
)

ENDPOINT_SEAMS = (
    Seam("vllm.v1.engine.async_llm", "AsyncLLM.engine_core", "read: the client of all engines"),
    Seam("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_all_async", "called: each engine", ("method",)),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.collective_rpc",
        "called: the workers' counts",
        ("method", "timeout", "args", "kwargs"),
        is_exact=True,
    ),
    Seam("vllm.engine.protocol", "EngineClient.vllm_config", "read: whether the plugin drafts"),
    *_members(_ENDPOINTS, "EndpointPlugin", "name required_tasks", "set by the plugin's routes"),
    Seam(_ENDPOINTS, "EndpointPlugin.attach_router", "adds the plugin's routes", ("app",), is_exact=True),
    Seam(
        _ENDPOINTS,
        "EndpointPlugin.init_state",
        "hands the engine to the plugin's routes",
        ("engine_client", "state", "args"),
        is_exact=True,
    ),
)

WORKER_SEAMS = (
    Seam("vllm.v1.worker.gpu_worker", "Worker.init_device", "extended: overrides while it runs"),
    Seam("vllm.v1.worker.gpu_worker", "Worker.use_v2_model_runner", "read: which runner is built"),
    Seam("vllm.v1.worker.gpu_worker", "Worker.load_model", "extended: overrides while it runs"),
    Seam("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", "extended: the plugin forgets its steps"),
    *(
        Seam("vllm.v1.worker.gpu_worker", f"Worker.{name}", why, (parameter,), is_exact=True)
        for name, parameter, why in (
            ("execute_model", "scheduler_output", "extended: notes new requests"),
            ("sample_tokens", "grammar_output", "extended: counts the accepted drafts"),
        )
    ),
    Seam("vllm.v1.worker.gpu_worker", "Worker.model_runner", "read: the runner that was built"),
    Seam("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "extended: overrides while it runs"),
    Seam("vllm.v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", "extended: the plugin forgets its steps"),
)

V1_SEAMS = (
    *(
        Seam(_V1, name, "replaced by a hybrid subclass while the runner is built")
        for name in ("EagleProposer", "Gemma4Proposer", "Step3p5MTPProposer", "DraftModelProposer")
    ),
    # vLLM 0.33 has no Medusa.
    Seam(_V1, "MedusaProposer", "replaced by a hybrid subclass while the runner is built", may_be_gone=True),
    Seam(
        "vllm.v1.spec_decode.medusa",
        "MedusaProposer.propose",
        "extended: joins its drafts with others",
        ("num_speculative_tokens",),
        may_be_gone=True,
    ),
    Seam(_V1, "create_custom_proposer", "replaced by the plugin's own drafter"),
    Seam(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        "replaced by the plugin's own drafter",
        ("vllm_config",),
        is_exact=True,
    ),
    Seam(_V1, "Sampler", "replaced by the strategy's sampler while the runner is built"),
    Seam(_V1, "RejectionSampler", "replaced by the strategy's verifier while the runner is built"),
    Seam(_V1, "GPUModelRunner._get_positions", "called: positions that key the noise"),
    *_members(
        _V1,
        "GPUModelRunner",
        "requests input_batch max_model_len scheduler_config speculative_config query_start_loc drafter sampler "
        "rejection_sampler use_async_scheduling discard_request_mask",
        "read: the batch, and the parts that were built",
    ),
    *_members(
        _V1,
        "GPUModelRunner",
        "_draft_token_ids _draft_token_req_ids",
        "set: no padding is verified",
    ),
    Seam(
        _V1,
        "GPUModelRunner._copy_draft_token_ids_to_cpu",
        "extended: no padding is verified",
        ("scheduler_output", "zeros_only"),
        is_exact=True,
    ),
    *_members(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        "req_ids num_reqs token_ids_cpu num_tokens_no_spec num_prompt_tokens vocab_size req_prompt_embeds",
        "read: the requests' tokens on the host; this step's are written first",
    ),
    *_members(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        "draft_token_ids num_draft_tokens cu_num_sampled_tokens target_logits_indices bonus_logits_indices "
        "logits_indices max_spec_len",
        "read: the request of each row",
    ),
    *_members(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        "temperature top_p top_k generators all_greedy all_random max_num_logprobs logprob_token_ids",
        "read: the requests' options",
    ),
    *_members("vllm.v1.outputs", "SamplerOutput", "sampled_token_ids logprobs_tensors", "returned"),
    Seam(
        _BASE,
        "SpecDecodeBaseProposer.propose",
        "extended: runs the model's steps",
        ("num_speculative_tokens",),
    ),
    *_members(
        _BASE,
        "SpecDecodeBaseProposer",
        "vllm_config num_speculative_tokens",
        "read; the second is set to the model's steps",
    ),
    Seam(_BASE, "SpecDecodeBaseProposer.take_last_draft_probs", "extended: adds one-hot rows"),
    Seam(
        _BASE,
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        "extended: it has this step's tokens as a tensor",
        ("sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
        is_exact=True,
    ),
    Seam(
        _BASE,
        "SpecDecodeBaseProposer.prepare_inputs_padded",
        "extended: it does nothing while the draft model sleeps",
        ("common_attn_metadata", "spec_decode_metadata", "valid_sampled_tokens_count"),
        is_exact=True,
    ),
    Seam(
        _BASE,
        "SpecDecodeBaseProposer.prepare_next_token_ids_cpu",
        "extended: it has this step's tokens as lists",
        ("sampled_token_ids", "requests", "gpu_input_batch", "num_scheduled_tokens"),
        is_exact=True,
    ),
    Seam(
        _REJECTION,
        "RejectionSampler.forward",
        "replaced",
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
        is_exact=True,
    ),
    *_members(_REJECTION, "RejectionSampler", "sampler is_processed_logprobs_mode", "read"),
    Seam(
        _REJECTION,
        "RejectionSampler.apply_logits_processors",
        "called: penalties and masks of the draft rows",
        ("logits", "sampling_metadata", "metadata"),
    ),
    *_members(f"{_PROCESSORS}.builtin", "MinTokensLogitsProcessor", "min_toks", "read: whether it acts on a batch"),
    *_members(f"{_PROCESSORS}.builtin", "LogitBiasLogitsProcessor", "biases", "read: whether it acts on a batch"),
    *(
        Seam(_PROCESSORS, name, "read: which processors act on a batch")
        for name in ("MinTokensLogitsProcessor", "LogitBiasLogitsProcessor")
    ),
    Seam(_PROCESSORS, "LogitsProcessors", "called: the processors of a batch but for some"),
    *_members(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        "no_penalties allowed_token_ids_mask bad_words_token_ids logitsprocs thinking_budget_state_holder",
        "read: whether a processor acts on a batch",
    ),
    Seam(
        _REJECTION,
        "RejectionSampler._get_logprobs_tensors",
        "called: logprobs of the emitted tokens",
        ("max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits", "sampled_token_ids"),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_top_p",
        "called: processed logprobs",
        ("logits", "k", "p"),
    ),
    Seam(_SAMPLER, "Sampler.apply_temperature", "called: processed logprobs", ("logits", "temp", "all_random")),
    Seam(
        _SAMPLER,
        "Sampler.sample",
        "replaced where a strategy is set",
        ("logits", "sampling_metadata", "logprobs_mode_override"),
        is_exact=True,
    ),
    Seam(
        _SAMPLER,
        "Sampler.apply_logits_processors",
        "called: penalties and masks of the bonus rows",
        ("logits", "sampling_metadata", "predict_bonus_token"),
    ),
)

V2_SEAMS = (
    *(
        Seam(_V2, name, "replaced while the runner is built")
        for name in ("init_speculator", "DraftTokensHandler", "RequestState", "RejectionSampler", "Sampler")
    ),
    *_members(
        _V2,
        "GPUModelRunner",
        "speculator rejection_sampler draft_tokens_handler speculative_config model_config device vllm_config "
        "decode_query_len",
        "read: the parts that were built",
    ),
    Seam(
        _V2_SPEC,
        "init_speculator",
        "replaced and called: vLLM's own speculator",
        ("vllm_config", "device", "req_states"),
        is_exact=True,
    ),
    *(
        Seam(f"{_V2_SPEC}.{module}.speculator", name, "replaced by a hybrid subclass while the speculator is built")
        for module, name in (
            ("mtp", "MTPSpeculator"),
            ("multi_module_mtp", "MultiModuleMTPSpeculator"),
            ("eagle", "EagleSpeculator"),
            ("gemma4", "Gemma4Speculator"),
            ("standalone_ar", "StandaloneARSpeculator"),
        )
    ),
    Seam(
        f"{_V2_SPEC}.speculator",
        "BaseSpeculator.propose",
        "extended",
        (
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "dummy_run",
            "num_speculative_tokens",
        ),
    ),
    Seam(f"{_V2_SPEC}.speculator", "BaseSpeculator.init_cudagraph_manager", "extended", ("cudagraph_mode",)),
    *_members(
        f"{_V2_SPEC}.speculator",
        "DraftModelSpeculator",
        "num_speculative_steps draft_logits vllm_config",
        "read and set: the model's steps, and rows for one-hot drafts",
    ),
    *_members(
        f"{_V2_SPEC}.speculator",
        "DraftModelSpeculator",
        "enable_adaptive_verification use_acceptance_estimator draft_token_confidence_probs draft_attn_layer_names",
        "set: has vLLM trim drafts by the arbiter's chances; and read",
    ),
    Seam(
        f"{_V2_SPEC}.adaptive_verification",
        "AdaptiveVerificationManager.record_confidences",
        "what is given to vLLM: one chance for each slot",
        ("confidence_probs", "input_batch"),
    ),
    *_members(
        "vllm.v1.attention.backend",
        "AttentionBackend",
        "supports_device_cpu_query_lens_mismatch get_builder_cls get_name",
        "called: whether trimmed batches can be run",
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.get_cudagraph_support",
        "called, for the same",
        ("vllm_config", "kv_cache_spec"),
    ),
    Seam(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len",
        "called, for the same",
        ("vllm_config", "kv_cache_spec"),
    ),
    Seam("vllm.v1.attention.backend", "AttentionCGSupport", "read, for the same"),
    Seam("vllm.config", "get_layers_from_vllm_config", "called: the target's attention layers"),
    *_members(
        "vllm.model_executor.layers.attention_layer_base",
        "AttentionLayerBase",
        "get_attn_backend get_kv_cache_spec",
        "called, for the same",
    ),
    Seam(
        f"{_V2_SPEC}.utils",
        "DraftTokensHandler.set_draft_tokens",
        "extended: says how many slots hold drafts",
        ("input_batch", "draft_tokens"),
        is_exact=True,
    ),
    *_members(
        f"{_V2_SPEC}.utils",
        "DraftTokensHandler",
        "get_draft_tokens device copy_stream copy_event",
        "extended and read: how many slots hold drafts",
    ),
    *_members("vllm.v1.outputs", "DraftTokenIds", "req_ids draft_token_ids", "returned"),
    Seam("vllm.v1.worker.gpu.async_utils", "async_copy_to_np", "called: copies how many slots hold drafts"),
    Seam(_V2_STATES, "RequestState.__init__", "extended: tokens on the device", ("use_dense_all_token_ids",)),
    Seam(
        _V2_STATES,
        "RequestState.add_request",
        "extended: tokens on the host",
        ("req_id", "prompt_len", "all_token_ids"),
    ),
    Seam(_V2_STATES, "RequestState.remove_request", "extended: counts of single requests", ("req_id",), is_exact=True),
    *_members(_V2_STATES, "RequestState", "all_token_ids total_len req_id_to_index", "read: the requests' tokens"),
    Seam("vllm.v1.worker.gpu.buffer_utils", "StagedWriteTensor.gpu", "read: the requests' tokens"),
    *_members("vllm.v1.worker.gpu.buffer_utils", "UvaBackedTensor", "gpu np", "read: the requests' options"),
    Seam("vllm.utils.platform_utils", "is_uva_available", "called: whether kernels see the host's memory"),
    Seam(
        "vllm.utils.torch_utils",
        "get_accelerator_view_from_cpu_tensor",
        "called: kernels write into the host's memory",
        ("cpu_tensor",),
    ),
    *_members(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        "num_reqs req_ids idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos cu_num_logits "
        "has_structured_output_reqs seq_lens_cpu_upper_bound",
        "read: the batch",
    ),
    Seam(f"{_V2_SAMPLE}.sampler", "Sampler.__init__", "extended", ("vllm_config", "max_num_reqs", "vocab_size")),
    Seam(
        f"{_V2_SAMPLE}.sampler",
        "Sampler.apply_sampling_params",
        "called: penalties, bias and masks",
        _V2_SAMPLING_PARAMETERS,
    ),
    Seam(
        f"{_V2_SAMPLE}.sampler",
        "Sampler.sample",
        "replaced",
        (*_V2_SAMPLING_PARAMETERS, "return_logprobs"),
        is_exact=True,
    ),
    *_members(
        f"{_V2_SAMPLE}.sampler", "Sampler", "sampling_states logprobs_mode return_sampling_mask", "read; the first set"
    ),
    Seam(f"{_V2_SAMPLE}.states", "SamplingStates.__init__", "subclassed", ("max_num_reqs", "vocab_size")),
    Seam(
        f"{_V2_SAMPLE}.states",
        "SamplingStates.add_request",
        "extended",
        ("req_idx", "sampling_params"),
        is_exact=True,
    ),
    *(
        Seam(
            f"{_V2_SAMPLE}.states",
            f"SamplingStates.{name}",
            "not applied here: the kernels apply it",
            ("logits", "expanded_idx_mapping", "idx_mapping_np"),
        )
        for name in ("apply_temperature", "apply_min_p", "apply_top_k_top_p")
    ),
    *_members(
        f"{_V2_SAMPLE}.states",
        "SamplingStates",
        "temperature top_k top_p min_p seeds vocab_size",
        "read: the requests' options",
    ),
    Seam(
        f"{_V2_SPEC}.rejection_sampler",
        "RejectionSampler.__call__",
        "extended: knows the slots that hold no draft",
        ("logits", "input_batch", "draft_logits", "invalid_drafts"),
        is_exact=True,
    ),
    Seam(
        f"{_V2_SPEC}.rejection_sampler",
        "RejectionSampler._verify",
        "replaced",
        (
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
        is_exact=True,
    ),
    *_members(f"{_V2_SPEC}.rejection_sampler", "RejectionSampler", "sampler num_speculative_steps", "read"),
    Seam(f"{_V2_SPEC}.rejection_sampler", "RejectionSampler.enable_adaptive_verification", "set where that cannot run"),
    Seam("vllm.config.model", "PROCESSED_LOGPROBS_MODES", "read: the kind of logprobs"),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "pad_vocab_size",
        "called: the stride between rows of logits",
        ("vocab_size",),
    ),
)

LEDGER = CONFIG_SEAMS + SCHEDULER_SEAMS + REQUEST_SEAMS + ENDPOINT_SEAMS + WORKER_SEAMS + V1_SEAMS + V2_SEAMS
