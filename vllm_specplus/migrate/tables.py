"""The options of the other systems' servers, and what each becomes of vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from vllm_specplus.config.dialects import FASTDEPLOY, PADDLENLP, RTP_LLM

FALSE = ("0", "false", "no", "off", "none", "")
"""The words that turn an option off, in small letters."""
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("auto", "half", "float16", "bfloat16", "float", "float32")},
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp32": "float32",
    }
)
"""The systems' names for the type of the weights, in small letters, and vLLM's."""
Kind = Literal["value", "switch", "model", "speculative", "none"]
_PD = "disaggregated prefill is vLLM's --kv-transfer-config with a connector, and a proxy in front of both servers"

_CONNECTOR = "vLLM's connector chooses how the KV cache travels, and has ports of its own"


@dataclass(frozen=True)
class Option:
    """One option of a server: a flag, which is written with dashes or underscores, or a variable.

    systems: whose it is. target: vLLM's flag, or the key of the speculative config; "" where there is none.
    kind: how the value is handed on. `switch`: the flag has no value, and is left out for a false one. `model`: the
    model, which stands first. `speculative`: a key of the speculative config.
    why: what differs, or why there is no counterpart. matters: whether the server differs without it.
    neutral: values that ask for nothing, so that they need no counterpart.
    value: the value for vLLM, whatever the option's own; "": the option's own.
    """

    name: str
    systems: tuple[str, ...]
    target: str = ""
    kind: Kind = "value"
    why: str = ""
    matters: bool = False
    neutral: tuple[str, ...] = ()
    value: str = ""


@dataclass(frozen=True)
class Default:
    """What a system takes for an option that is left out, where vLLM takes something else.

    says: its value there. flag, value: what asks vLLM for it; a switch has "". program: a part of the program's name,
    where only that one has this default.
    """

    name: str
    says: str
    flag: str
    value: str = ""
    program: str = ""


def _same(systems: tuple[str, ...], *names: str, kind: Kind = "value") -> tuple[Option, ...]:
    return tuple(Option(name, systems, "--" + name.replace("_", "-"), kind) for name in names)


_FD, _NLP, _RTP = (FASTDEPLOY,), (PADDLENLP,), (RTP_LLM,)
# The program of PaddleNLP's serving image.
_SERVING_IMAGE = "start_server"
_INTERNAL = "an inner detail of that system: vLLM finds its own"
# RTP-LLM's arguments of its kernels, memory and scheduler.
_RTP_INNER = [
    "enable_fmha",
    "enable_flashinfer_trtllm_gen",
    "enable_flashinfer_trt_fmha_v2",
    "enable_paged_flashinfer_trt_fmha_v2",
    "enable_open_source_fmha",
    "enable_paged_open_source_fmha",
    "disable_flashinfer_native",
    "enable_xqa",
    "deep_gemm_num_sm",
    "arm_gemm_use_kai",
    "enable_stable_scatter_add",
    "enable_multi_block_mode",
    "rocm_hipblaslt_config",
    "ft_disable_custom_ar",
    "device_reserve_memory_bytes",
    "host_reserve_memory_bytes",
    "overlap_math_sm_count",
    "overlap_comm_type",
    "m_split",
    "enable_comm_overlap",
    "not_use_default_stream",
    "use_deepep_p2p_low_latency",
    "deep_ep_num_sm",
    "eplb_balance_layer_per_step",
    "enable_flashinfer_sample_kernel",
    "concurrency_with_block",
    "worker_info_port_num",
    "world_size",
    "scheduler_reserve_resource_ratio",
    "use_batch_decode_scheduler",
    "max_context_batch_size",
    "batch_decode_scheduler_batch_size",
    "step_records_time_range",
    "step_records_max_size",
    "disable_pdl",
    "load_method",
]
_RTP_DEBUG = [
    "ft_nvtx",
    "py_inference_log_response",
    "trace_memory",
    "trace_malloc_stack",
    "enable_device_perf",
    "ft_core_dump_on_exception",
    "ft_alog_conf_path",
    "gen_timeline_sync",
    "torch_cuda_profiler_dir",
    "eplb_control_step",
    "eplb_test_mode",
    "fake_balance_expert",
]
_RTP_SERVICES = [
    "use_local",
    "remote_rpc_server_ip",
    "decode_cm2_config",
    "remote_vit_server_ip",
    "multimodal_part_cm2_config",
    "load_balance",
    "wrr_available_ratio",
    "rank_factor",
]
_OPTIONS = (
    # FastDeploy: docs/parameters.md
    *_same(_FD, "max_model_len", "tensor_parallel_size", "data_parallel_size", "max_num_seqs", "block_size"),
    *_same(_FD, "gpu_memory_utilization", "num_gpu_blocks_override", "max_num_batched_tokens", "served_model_name"),
    *_same(_FD, "tokenizer", "revision", "chat_template", "tool_call_parser", "reasoning_parser", "port", "host"),
    *_same(_FD, "limit_mm_per_prompt", "mm_processor_kwargs"),
    *_same(_FD, "long_prefill_token_threshold", "api_key"),
    *_same(_FD, "enable_prefix_caching", "enable_chunked_prefill", "enable_expert_parallel", kind="switch"),
    *_same(_FD, "disable_custom_all_reduce", "trust_remote_code", kind="switch"),
    Option("max_num_partial_prefills", _FD, "", "none", "vLLM's scheduler has no such limit"),
    Option("max_long_partial_prefills", _FD, "", "none", "vLLM's scheduler has no such limit"),
    Option("model", _FD, "", "model"),
    Option("tool_parser_plugin", _FD, "--tool-parser-plugin"),
    Option("guided_decoding_backend", _FD, "", "none", "vLLM chooses one itself", neutral=("off", "auto")),
    Option("speculative_config", _FD, "--speculative-config", "none"),
    Option("quantization", _FD, "--quantization", "value"),
    Option("batch_size", (FASTDEPLOY, PADDLENLP), "--max-num-seqs"),
    Option("max_concurrency", _FD, "", "none", "vLLM takes every connection; --max-num-seqs bounds what runs"),
    Option("workers", _FD, "--api-server-count"),
    Option(
        "splitwise_role",
        _FD,
        "--kv-transfer-config",
        "none",
        f"{_PD}; name your connector, with kv_role kv_producer for prefill and kv_consumer for decode",
        matters=True,
        neutral=("mixed",),
    ),
    Option("innode_prefill_ports", _FD, "", "none", _PD, matters=True),
    Option("cache_transfer_protocol", _FD, "--kv-transfer-config", "none", _CONNECTOR, matters=True),
    Option("rdma_comm_ports", _FD, "--kv-transfer-config", "none", _CONNECTOR, matters=True),
    Option("pd_comm_port", _FD, "--kv-transfer-config", "none", _CONNECTOR, matters=True),
    Option("router", _FD, "", "none", "the proxy of disaggregated prefill takes its place", True),
    Option("scheduler_name", _FD, "", "none", "the proxy of disaggregated prefill takes its place", True, ("local",)),
    *(
        Option(name, _FD, "", "none", "it belongs to FastDeploy's scheduler for disaggregated prefill")
        for name in ("scheduler_host", "scheduler_port", "scheduler_ttl", "scheduler_topic", "scheduler_password")
    ),
    *(
        Option(name, _FD, "", "none", _INTERNAL)
        for name in ("engine_worker_queue_port", "cache_queue_port", "kv_cache_ratio", "static_decode_blocks")
    ),
    Option("metrics_port", _FD, "", "none", "vLLM serves /metrics at its own port"),
    Option("max_waiting_time", _FD, "", "none", "vLLM lets a request wait", neutral=("-1",)),
    Option("config", _FD, "", "none", "a file of FastDeploy's options: give it to this command with --yaml", True),
    Option("use_warmup", _FD, "", "none", "vLLM warms up always"),
    Option("use_cudagraph", _FD, "", "none", "vLLM captures CUDA graphs unless --enforce-eager"),
    Option("graph_optimization_config", _FD, "", "none", "vLLM's own is --compilation-config"),
    Option("enable_mm", _FD, "", "none", "vLLM reads it from the model"),
    Option("enable_logprob", _FD, "", "none", "vLLM answers requests for logprobs always"),
    Option("guided_decoding_disable_any_whitespace", _FD, "", "none", "vLLM's is a key of --structured-outputs-config"),
    Option("swap_space", _FD, "", "none", "vLLM's is --kv-offloading-size, which works otherwise"),
    Option("dynamic_load_weight", _FD, "", "none", "vLLM has its own ways to load weights anew", True, FALSE),
    Option("lm_head_fp32", _FD, "", "none", "vLLM's is head_dtype of --hf-overrides", True, FALSE),
    Option("FD_LOG_DIR", _FD, "", "none", "vLLM logs to the terminal; VLLM_LOGGING_CONFIG_PATH sets files"),
    Option("SPEC_TOKENUM_THRESHOLD", _FD, "", "none", "the drafts of a whole step: the arbiter's prices bound them"),
    Option(
        "INFER_WITH_REFERENCE_TOKENUM_THRESHOLD",
        (FASTDEPLOY, PADDLENLP),
        "",
        "none",
        "the tokens of a whole step: the arbiter's prices bound them",
    ),
    # PaddleNLP: the predictor's arguments, and the variables of its serving image
    Option("model_name_or_path", _NLP, "", "model"),
    Option("dtype", _NLP, "--dtype"),
    Option("total_max_length", _NLP, "--max-model-len"),
    Option("src_length", _NLP, "", "none", "total_max_length is the limit of both together"),
    Option("max_length", _NLP, "", "none", "a request's own max_tokens"),
    *(Option(name, _NLP, "", "none", "a request's own field") for name in ("top_p", "top_k", "temperature")),
    *(
        Option(name, _NLP, "", "none", _INTERNAL)
        for name in (
            "inference_model",
            "append_attn",
            "block_attn",
            "mode",
            "output_via_mq",
            "mla_use_matrix_absorption",
        )
    ),
    *(
        Option(name, _NLP, name, "speculative")
        for name in (
            "speculate_method",
            "speculate_max_draft_token_num",
            "speculate_max_ngram_size",
            "speculate_verify_window",
            "speculate_max_candidate_len",
            "draft_model_name_or_path",
            "draft_model_quant_type",
            "return_full_hidden_states",
        )
    ),
    Option("quant_type", _NLP, "--quantization"),
    Option("gpus", _NLP, "--tensor-parallel-size", "none", "it is their number, on all machines together", True),
    Option("ips", _NLP, "--master-addr", "none", "it is the first; each machine also gets --nnodes, --node-rank", True),
    Option("SPECULATE_METHOD", _NLP, "speculate_method", "speculative"),
    Option("SPECULATE_MODEL_PATH", _NLP, "draft_model_name_or_path", "speculative"),
    Option("SPECULATE_MODEL_QUANT_TYPE", _NLP, "draft_model_quant_type", "speculative"),
    Option("SPECULATE_MAX_DRAFT_TOKEN_NUM", _NLP, "speculate_max_draft_token_num", "speculative"),
    Option("SPECULATE_MAX_NGRAM_SIZE", _NLP, "speculate_max_ngram_size", "speculative"),
    Option(
        "SPECULATE_VERIFY_USE_TOPK",
        _NLP,
        "verify_strategy",
        "speculative",
        "PaddleNLP's greedy verification",
        neutral=FALSE,
        value="greedy",
    ),
    Option("MODEL_PATH", _NLP, "", "none", "where PaddleNLP keeps downloaded models; vLLM's is --download-dir"),
    Option("MODEL_MTP_PATH", _NLP, "", "none", "mounted for SPECULATE_MODEL_PATH"),
    Option("model_name", _NLP, "", "model"),
    Option("MP_NUM", _NLP, "--tensor-parallel-size"),
    Option("MP_NNODE", _NLP, "--nnodes"),
    Option("POD_0_IP", _NLP, "--master-addr"),
    Option("POD_IPS", _NLP, "", "none", "each machine gets --node-rank", True),
    Option("SERVICE_HTTP_PORT", _NLP, "--port"),
    Option("PUSH_MODE_HTTP_PORT", _NLP, "--port"),
    Option("BATCH_SIZE", _NLP, "--max-num-seqs"),
    Option("BLOCK_BS", _NLP, "", "none", "it sizes the KV cache: vLLM takes what --gpu-memory-utilization leaves"),
    Option("PUSH_MODE_HTTP_WORKERS", _NLP, "--api-server-count"),
    Option("USE_WARMUP", _NLP, "", "none", "vLLM warms up always"),
    Option("USE_HF_TOKENIZER", _NLP, "", "none", "vLLM uses it always"),
    Option("USE_CACHE_KV_INT8", _NLP, "--kv-cache-dtype", "none", "vLLM has other forms", True, FALSE),
    Option("MAX_CACHED_TASK_NUM", _NLP, "", "none", "vLLM's queue has no limit"),
    Option("DISABLE_STREAMING", _NLP, "", "none", "a request's own stream"),
    Option("MODEL_DIR", _NLP, "", "none", "where the model is mounted"),
    Option("OUTPUT_LOG_TO_CONSOLE", _NLP, "", "none", "vLLM logs to the terminal"),
    *(
        Option(name, _NLP, "", "none", "vLLM serves health, metrics and requests at one port, over HTTP")
        for name in (
            "HEALTH_HTTP_PORT",
            "HTTP_PORT",
            "SERVICE_GRPC_PORT",
            "GRPC_PORT",
            "METRICS_HTTP_PORT",
            "METRICS_PORT",
        )
    ),
    *(Option(name, _NLP, "", "none", _INTERNAL) for name in ("INTER_PROC_PORT", "INTER_QUEUE_PORT")),
    Option("BLOCK_RATIO", _NLP, "", "none", _INTERNAL),
    Option("MAX_SEQ_LEN", _NLP, "", "none", "--max-model-len is the limit of prompt and answer together"),
    Option("MAX_DEC_LEN", _NLP, "", "none", "a request's own max_tokens"),
    # RTP-LLM: its server's arguments; a variable has the name in capitals
    Option("checkpoint_path", _RTP, "", "model"),
    Option("model_type", _RTP, "", "none", "vLLM reads it from the checkpoint"),
    Option("tokenizer_path", _RTP, "--tokenizer"),
    Option("act_type", _RTP, "--dtype"),
    *(
        Option(name, _RTP, name, "speculative")
        for name in (
            "sp_type",
            "gen_num_per_cycle",
            "sp_checkpoint_path",
            "sp_model_type",
            "sp_quantization",
            "sp_act_type",
            "sp_min_token_match",
            "sp_max_token_match",
            "tree_decode_config",
            "force_stream_sample",
            "force_score_context_attention",
        )
    ),
    Option("GEN_NUM_PER_CIRCLE", _RTP, "gen_num_per_cycle", "speculative"),
    Option("quantization", _RTP, "--quantization"),
    Option("max_seq_len", _RTP, "--max-model-len"),
    Option("max_batch_size", _RTP, "--max-num-seqs"),
    Option("concurrency_limit", _RTP, "", "none", "vLLM takes every connection; --max-num-seqs bounds what runs"),
    Option("tp_size", _RTP, "--tensor-parallel-size"),
    Option("dp_size", _RTP, "--data-parallel-size"),
    Option("pp_size", _RTP, "--pipeline-parallel-size"),
    Option("start_port", _RTP, "--port"),
    Option("reuse_cache", _RTP, "--enable-prefix-caching", "switch"),
    Option("seq_size_per_block", _RTP, "--block-size"),
    Option("fp8_kv_cache", _RTP, "--kv-cache-dtype", neutral=FALSE, value="fp8"),
    Option("enable_cuda_graph", _RTP, "", "none", "vLLM captures CUDA graphs unless --enforce-eager"),
    Option("enable_native_cuda_graph", _RTP, "", "none", _INTERNAL),
    Option("warm_up", _RTP, "", "none", "vLLM warms up always"),
    Option("log_level", _RTP, "", "none", "vLLM's is the variable VLLM_LOGGING_LEVEL"),
    Option("role_type", _RTP, "--kv-transfer-config", "none", _PD, True, ("PDFUSION",)),
    Option("pd_separation", _RTP, "--kv-transfer-config", "none", _PD, True, FALSE),
    Option("use_cache_store", _RTP, "--kv-transfer-config", "none", _PD, True, FALSE),
    Option("world_rank", _RTP, "--node-rank", "none", "vLLM counts machines by --node-rank", True, ("0",)),
    Option("local_world_size", _RTP, "", "none", _INTERNAL),
    Option("reserver_runtime_mem_mb", _RTP, "", "none", "vLLM's is --gpu-memory-utilization"),
    Option("think_mode", _RTP, "--reasoning-parser", "none", "vLLM has a parser by model", True, FALSE),
    Option("int8_mode", _RTP, "--quantization", neutral=FALSE, value="INT8"),
    Option("sp_int8_mode", _RTP, "sp_quantization", "speculative", neutral=FALSE, value="INT8"),
    Option("SP_WEIGHT_TYPE", _RTP, "sp_quantization", "speculative"),
    *(
        Option(name, _RTP, "", "none", _INTERNAL)
        for name in (
            "cache_store_rdma_mode",
            "cache_store_rdma_connect_timeout_ms",
            "balance_method",
            "use_deepep_internode",
            "use_deepep_low_latency",
            "use_deepep_moe",
            "enable_layer_micro_batch",
            "eplb_stats_window_size",
            "eplb_force_repack",
            "prefill_max_wait_timeout_us",
            "prefill_retry_timeout_ms",
            "prefill_retry_time",
            "load_cache_timeout_ms",
            "max_rpc_timeout_ms",
            "rdma_connect_retry_times",
            "enable_merge_w13",
        )
    ),
    *(Option(name, _RTP, "", "none", _INTERNAL) for name in _RTP_INNER),
    *(Option(name, _RTP, "", "none", "for debugging; vLLM has its own ways") for name in _RTP_DEBUG),
    *(Option(name, _RTP, "", "none", "a router in front of several servers does so") for name in _RTP_SERVICES),
    Option("ep_size", _RTP, "--enable-expert-parallel", "none", "vLLM takes all GPUs for it", True, ("1",)),
    Option("enable_ffn_disaggregate", _RTP, "", "none", "vLLM runs all of a layer in one place", True, FALSE),
    Option("multi_task_prompt", _RTP, "", "none", "prefix caching finds a common prompt by itself"),
    Option("multi_task_prompt_str", _RTP, "", "none", "prefix caching finds a common prompt by itself"),
    Option("enable_3fs", _RTP, "--kv-transfer-config", "none", "vLLM has connectors to stores", True, FALSE),
    Option("max_lora_model_size", _RTP, "", "none", "vLLM's are --max-loras and --max-cpu-loras"),
    Option("eplb_mode", _RTP, "--enable-eplb", "none", "vLLM's expert balancing has --enable-eplb", False, ("NONE",)),
    Option("eplb_update_time", _RTP, "", "none", "vLLM's is step_interval of --eplb-config"),
    Option("redundant_expert", _RTP, "", "none", "vLLM's is num_redundant_experts of --eplb-config"),
)
OPTIONS: Mapping[tuple[str, str], Option] = MappingProxyType(
    {(system, option.name): option for option in _OPTIONS for system in option.systems}
)
"""By system and name."""
# What the shell and the driver read, and other programs of the machine.
FOREIGN_VARIABLES = (
    "CUDA_",
    "NCCL_",
    "LD_",
    "PYTHON",
    "PATH",
    "HOME",
    "TOKENIZERS_",
    "OMP_",
    "HF_",
    "ASCEND_",
    "VLLM_",
)
DEFAULTS: Mapping[str, tuple[Default, ...]] = MappingProxyType(
    {
        FASTDEPLOY: (
            Default("max_model_len", "2048", "--max-model-len", "2048"),
            Default("max_num_seqs", "8", "--max-num-seqs", "8"),
            Default("block_size", "64", "--block-size", "64"),
            Default("enable_prefix_caching", "false", "--no-enable-prefix-caching"),
            Default("enable_chunked_prefill", "false", "--no-enable-chunked-prefill"),
        ),
        PADDLENLP: (
            Default("SERVICE_HTTP_PORT", "9965", "--port", "9965", _SERVING_IMAGE),
            Default("BATCH_SIZE", "50", "--max-num-seqs", "50", _SERVING_IMAGE),
        ),
        RTP_LLM: (
            Default("start_port", "8088", "--port", "8088"),
            Default("reuse_cache", "false", "--no-enable-prefix-caching"),
        ),
    }
)
"""By system."""
