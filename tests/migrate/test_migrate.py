"""`vllm-specplus migrate`: the documents' own commands, and what becomes of them."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from vllm_specplus.cli import main
from vllm_specplus.migrate.tables import OPTIONS
from vllm_specplus.migrate.vllm_flags import vllm_flags

FASTDEPLOY_MTP = """python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --tensor-parallel-size 4 \\
    --config ${path_to_FastDeploy}benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml \\
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'"""
FASTDEPLOY_PREFILL = """export FD_LOG_DIR="log_prefill"
export CUDA_VISIBLE_DEVICES=0,1,2,3
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --port 8180 \\
    --metrics-port 8181 \\
    --engine-worker-queue-port 8182 \\
    --cache-queue-port 8183 \\
    --workers 2 \\
    --tensor-parallel-size 4 \\
    --quantization wint4 \\
    --splitwise-role "prefill" \\
    --scheduler-name "splitwise" \\
    --scheduler-host "127.0.0.1" \\
    --scheduler-port 6379 \\
    --scheduler-ttl 9000 \\
    --scheduler-topic mtp \\
    --config ${path_to_FastDeploy}/benchmarks/yaml/eb45t-32k-wint4-mtp-tp4-prefill.yaml \\
    --scheduler-password "scheduler_mtp" \\
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}' &"""
PADDLENLP_NGRAM = (
    "python ./predict/predictor.py --model_name_or_path meta-llama/Llama-2-7b-chat --inference_model --dtype float16 "
    "--speculate_method inference_with_reference --speculate_max_draft_token_num 5 --speculate_max_ngram_size 2"
)
PADDLENLP_MTP = """docker run --gpus all --shm-size 32G --network=host --privileged --cap-add=SYS_PTRACE \\
-v $MODEL_PATH:/models -v $MODEL_MTP_PATH:/models-mtp -v /ssd2/paddle_example:/work -e "model_name=${model_name}" \\
-dit ccr-2vdh3abv-pub.cnc.bj.baidubce.com/paddlepaddle/paddlenlp:llm-serving-cuda124-cudnn9-v2.3 /bin/bash \\
-c -ex 'export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 && export MP_NUM=8 \
&& export SPECULATE_MODEL_QUANT_TYPE="a8w8_fp8" && export SPECULATE_METHOD="mtp" \
&& export SPECULATE_MODEL_PATH="/models-mtp" && export SPECULATE_MAX_DRAFT_TOKEN_NUM=1 \
&& export BLOCK_BS=32 && export BLOCK_RATIO=0.25 && export BATCH_SIZE="128" && start_server $model_name \
&& tail -f /dev/null'"""
PADDLENLP_SCRIPT = """export MODEL_TAG=deepseek-ai/DeepSeek-R1-FP8
export DRAFT_MODEL_TAG=deepseek-ai/DeepSeek-R1-MTP-FP8
export QUANT_MODE=a8w8_fp8
export DRAFT_MODEL_QUANT_MODE=a8w8_fp8
export TOTAL_MAX_LENGTH=8192
export MAX_DEC_LEN=2048
export CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"
python -m paddle.distributed.launch --ips "192.168.0.1,192.168.0.2"\\
  --gpus ${CUDA_VISIBLE_DEVICES} \\
  predictor.py \\
  --model_name_or_path ${MODEL_TAG} \\
  --dtype bfloat16 \\
  --mode dynamic \\
  --inference_model 1 \\
  --append_attn 1 \\
  --total_max_length ${TOTAL_MAX_LENGTH} \\
  --quant_type ${QUANT_MODE} \\
  --max_length ${MAX_DEC_LEN} \\
  --speculate_method mtp \\
  --draft_model_name_or_path ${DRAFT_MODEL_TAG} \\
  --draft_model_quant_type ${DRAFT_MODEL_QUANT_MODE} \\
  --speculate_max_draft_token_num 1 \\
  --return_full_hidden_states 1 \\
  --mla_use_matrix_absorption 1"""
RTP_VANILLA = """MODEL_TYPE=qwen_7b     \\
CHECKPOINT_PATH=/mnt/nas1/hf/Qwen-7B-Chat/     \\
TOKENIZER_PATH=/mnt/nas1/dm/qwen_sp/qwen_tokenizer     \\
TP_SIZE=1     \\
SP_TYPE=vanilla     \\
GEN_NUM_PER_CIRCLE=5     \\
SP_MODEL_TYPE=qwen_1b8     \\
SP_CHECKPOINT_PATH=/mnt/nas1/hf/qwen_1b8_sft/     \\
WARM_UP=1     \\
REUSE_CACHE=1     \\
START_PORT=26666   \\
/opt/conda310/bin/python3 -m rtp_llm.start_server"""
RTP_DETERMINISTIC = (
    "python3 -m rtp_llm.start_server --checkpoint_path /models/qwen --sp_type deterministic --gen_num_per_cycle 128 "
    "--sp_min_token_match 2 --sp_max_token_match 2"
)
ASCEND = (
    "vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --tensor-parallel-size 1 --speculative-config "
    '\'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\''
)
EP = "--enable-expert-parallel"
# (command, status, vLLM's words without the config, the config, parts of what is said)
COMMANDS: list[tuple[str, int, str, dict[str, Any], list[str]]] = [
    (
        FASTDEPLOY_MTP,
        2,
        'vllm serve "${path_to_main_model}" --tensor-parallel-size 4',
        {"dialect": "fastdeploy", "method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"},
        ["missing: config=", "give it to this command with --yaml", 'note: speculative_config: verify_strategy="topp"'],
    ),
    (
        FASTDEPLOY_PREFILL,
        2,
        'vllm serve "${path_to_main_model}" --port 8180 --api-server-count 2 --tensor-parallel-size 4',
        {"dialect": "fastdeploy", "method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"},
        [
            "missing: splitwise-role=prefill: --kv-transfer-config must be written by hand",
            "and a proxy",
            "missing: quantization=wint4: vLLM makes no 4-bit weights",
            "note: CUDA_VISIBLE_DEVICES=0,1,2,3: stays in the environment",
            "note: scheduler-password=scheduler_mtp: has no counterpart",
        ],
    ),
    (
        PADDLENLP_NGRAM,
        0,
        "vllm serve meta-llama/Llama-2-7b-chat --dtype float16",
        {"dialect": "paddlenlp", "speculate_method": "inference_with_reference", "speculate_max_draft_token_num": 5}
        | {"speculate_max_ngram_size": 2},
        ['min_ngram_size=1, ngram_match_order="first": PaddleNLP\'s defaults'],
    ),
    (
        PADDLENLP_MTP,
        0,
        'vllm serve "$model_name" --tensor-parallel-size 8 --max-num-seqs 128',
        {"dialect": "paddlenlp", "draft_model_quant_type": "a8w8_fp8", "speculate_method": "mtp"}
        | {"draft_model_name_or_path": "/models-mtp", "speculate_max_draft_token_num": 1},
        [
            'draft_model_quant_type="a8w8_fp8" -> quantization="fp8"',
            "note: BLOCK_RATIO=0.25: has no counterpart",
            "note: BLOCK_BS=32: has no counterpart: it sizes the KV cache",
        ],
    ),
    (
        PADDLENLP_SCRIPT,
        2,
        "vllm serve deepseek-ai/DeepSeek-R1-FP8 --dtype bfloat16 --max-model-len 8192 --quantization fp8",
        {"dialect": "paddlenlp", "speculate_method": "mtp"}
        | {"draft_model_name_or_path": "deepseek-ai/DeepSeek-R1-MTP-FP8", "draft_model_quant_type": "a8w8_fp8"}
        | {"speculate_max_draft_token_num": 1, "return_full_hidden_states": 1},
        [
            "note: MODEL_TAG=deepseek-ai/DeepSeek-R1-FP8: is put in where the command names it",
            "note: quant_type=a8w8_fp8 -> --quantization fp8",
            "missing: ips=192.168.0.1,192.168.0.2: --master-addr must be written by hand",
            "missing: gpus=0,1,2,3,4,5,6,7: --tensor-parallel-size must be written by hand",
        ],
    ),
    (
        PADDLENLP_SCRIPT.replace("-FP8", "").replace("a8w8_fp8", "weight_only_int8"),
        2,
        "vllm serve deepseek-ai/DeepSeek-R1 --dtype bfloat16 --max-model-len 8192 "
        "--quantization int8_per_channel_weight_only",
        {"dialect": "paddlenlp", "speculate_method": "mtp"}
        | {"draft_model_name_or_path": "deepseek-ai/DeepSeek-R1-MTP", "draft_model_quant_type": "weight_only_int8"}
        | {"speculate_max_draft_token_num": 1, "return_full_hidden_states": 1},
        ['draft_model_quant_type="weight_only_int8" -> quantization="int8_per_channel_weight_only"'],
    ),
    (
        RTP_VANILLA,
        0,
        "vllm serve /mnt/nas1/hf/Qwen-7B-Chat/ --tokenizer /mnt/nas1/dm/qwen_sp/qwen_tokenizer "
        "--tensor-parallel-size 1 --enable-prefix-caching --port 26666",
        {"dialect": "rtp_llm", "sp_type": "vanilla", "gen_num_per_cycle": 5, "sp_model_type": "qwen_1b8"}
        | {"sp_checkpoint_path": "/mnt/nas1/hf/qwen_1b8_sft/"},
        ["note: GEN_NUM_PER_CIRCLE=5 -> gen_num_per_cycle", 'sp_type="vanilla" -> method="draft_model"'],
    ),
    (
        RTP_DETERMINISTIC,
        0,
        "vllm serve /models/qwen",
        {"dialect": "rtp_llm", "sp_type": "deterministic", "gen_num_per_cycle": 128, "sp_min_token_match": 2}
        | {"sp_max_token_match": 2},
        ['sp_type="deterministic" -> method="naive"', "adaptive=false: RTP-LLM's defaults"],
    ),
    (
        ASCEND,
        0,
        "vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --tensor-parallel-size 1",
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        ["an NPU refuses its keys"],
    ),
]


# The shell leaves no variables in the words that it hands over.
COMMANDS_AND_FORMS = [(*case, as_one) for case in COMMANDS for as_one in (True, False) if as_one or "$" not in case[0]]


@pytest.mark.parametrize(("command", "status", "words", "config", "said", "as_one_word"), COMMANDS_AND_FORMS)
def test_the_documents_commands(
    command: str,
    status: int,
    words: str,
    config: dict[str, Any],
    said: list[str],
    as_one_word: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rest = [command] if as_one_word else ["--", *shlex.split(command.replace("\\\n", " "))]
    assert main(["migrate", *rest]) == status
    out, err = capsys.readouterr()
    assert out == f"VLLM_PLUGINS=specplus {words} --speculative-config {shlex.quote(json.dumps(config))}\n"
    assert all(part in err for part in said), err
    assert ("missing: " in err) == (status == 2)
    # The engine takes what is printed.
    assert main(["check", json.dumps(config)]) == 0


def test_files_of_variables_and_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment, yaml = tmp_path / "env", tmp_path / "config.yaml"
    environment.write_text('# MTP\nexport SPECULATE_METHOD="mtp"\nSPECULATE_MAX_DRAFT_TOKEN_NUM=2\nmodel_name=org/m\n')
    assert main(["migrate", "--env", str(environment)]) == 0
    config = {"dialect": "paddlenlp", "speculate_method": "mtp", "speculate_max_draft_token_num": 2}
    assert capsys.readouterr().out.endswith(f"serve org/m --speculative-config {shlex.quote(json.dumps(config))}\n")
    yaml.write_text("max_model_len: 32768\nmax_num_seqs: 96\nkv_cache_ratio: 0.5\ntensor_parallel_size: 4\n")
    command = "python -m fastdeploy.entrypoints.openai.api_server --model org/m --max-num-seqs 8"
    assert main(["migrate", "--yaml", str(yaml), command]) == 0
    out, err = capsys.readouterr()
    assert out == "vllm serve org/m --max-model-len 32768 --max-num-seqs 8 --tensor-parallel-size 4\n"
    assert "note: kv_cache_ratio=0.5: has no counterpart" in err


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
NGRAM_WORDS = f"VLLM_PLUGINS=specplus vllm serve org/m --speculative-config '{json.dumps(NGRAM)}'"
SHELL_FORMS = [
    # Short options, switches, the model after a switch.
    ("vllm serve org/m -tp 2 -dp=4 -ep", "vllm serve org/m --tensor-parallel-size 2 --data-parallel-size 4 " + EP),
    (f"vllm serve org/m -sc '{json.dumps(NGRAM)}'", NGRAM_WORDS),
    ("vllm serve --trust-remote-code org/m -O3", "vllm serve org/m --trust-remote-code --optimization-level 3"),
    (
        "vllm serve org/m --speculative-config.method ngram --speculative-config.num-speculative-tokens 3",
        NGRAM_WORDS,
    ),
    # Redirections, pipes, other programs.
    ("nohup vllm serve org/m --enforce-eager > log.txt 2>&1 &", "vllm serve org/m --enforce-eager"),
    ("vllm serve org/m --port 2 > log 2> errors", "vllm serve org/m --port 2"),
    ("vllm serve org/m -tp 2 2>&1 | tee log", "vllm serve org/m --tensor-parallel-size 2"),
    ("pip install vllm && vllm serve org/m -tp 2; echo done", "vllm serve org/m --tensor-parallel-size 2"),
    ("cd x # here 'tis\nvllm serve org/m -tp 2\necho 3", "vllm serve org/m --tensor-parallel-size 2"),
    (
        "docker run --gpus all -p 80:80 vllm/vllm-openai --model org/m -tp 2",
        "vllm serve org/m --tensor-parallel-size 2",
    ),
    ("docker run --gpus all image bash -c 'vllm serve org/m -tp 2'", "vllm serve org/m --tensor-parallel-size 2"),
    # One vLLM name, and one of ours, for what others say otherwise.
    (
        "FP8_KV_CACHE=1 INT8_MODE=1 CHECKPOINT_PATH=org/m python3 -m rtp_llm.start_server",
        "vllm serve org/m --kv-cache-dtype fp8 --quantization int8_per_channel_weight_only",
    ),
    # Words that turn an option off.
    *(
        (
            f"FP8_KV_CACHE={off} INT8_MODE={off} PD_SEPARATION={off} REUSE_CACHE={off} CHECKPOINT_PATH=org/m python3 "
            f"-m rtp_llm.start_server --use_cache_store {off} --tp_size 1",
            "vllm serve org/m --no-enable-prefix-caching --tensor-parallel-size 1",
        )
        for off in ("0", "False", "no", "''")
    ),
    ("USE_CACHE_KV_INT8=False SPECULATE_VERIFY_USE_TOPK=off start_server org/m", "vllm serve org/m"),
    # Quotation and variables.
    ('vllm serve org/m --api-key "$"x', "vllm serve org/m --api-key '$x'"),
    ("vllm serve org/m --api-key 'a$b'", "vllm serve org/m --api-key 'a$b'"),
    ('vllm serve org/m --api-key "a\\$b\\"\\`"', "vllm serve org/m --api-key 'a$b\"`'"),
    ("b=1; vllm serve org/m --api-key 'a$b' a\\$b a$b", "vllm serve org/m --api-key 'a$b' 'a$b' a1"),
    ("vllm serve org/m --host ${H:-a} --revision $R", 'vllm serve org/m --host "${H:-a}" --revision "$R"'),
    ("P=2; vllm serve org/m --port ${P:-3}", "vllm serve org/m --port 2"),
    ("model_path=org/m; vllm serve $model_path", "vllm serve org/m"),
    ('A="--port 3 -tp 2"; vllm serve org/m $A', "vllm serve org/m --port 3 --tensor-parallel-size 2"),
    ('A="a b"; vllm serve org/m --api-key "$A" ${A}', "vllm serve org/m --api-key 'a b' a b"),
    (
        "X=1 vllm serve org/m --served-model-name docker bash -n 2",
        "vllm serve org/m --served-model-name docker bash --nnodes 2",
    ),
    ("model=org/m; python -m fastdeploy.x --model $model", "vllm serve org/m"),
    ("PORT=22 QUANTIZATION=fp8 fastdeploy serve org/m", "vllm serve org/m"),
    # Names of types.
    *(
        (
            f"python3 -m rtp_llm.start_server --checkpoint_path org/m --act_type {name}",
            f"vllm serve org/m --dtype {ours}",
        )
        for name, ours in (("FP16", "float16"), ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("FP32", "float32"))
    ),
    # The last spelling of a flag, and flags with several values.
    ("vllm serve org/m -tp 1 --tensor-parallel-size 2 -tp 4", "vllm serve org/m --tensor-parallel-size 4"),
    ("vllm serve org/m --max_num_seqs 1 --max-num-seqs=2", "vllm serve org/m --max-num-seqs 2"),
    ("vllm serve org/m --enforce-eager --no-enforce-eager", "vllm serve org/m --no-enforce-eager"),
    ("vllm serve org/m --middleware a --middleware b", "vllm serve org/m --middleware a --middleware b"),
    *(
        (f"vllm serve org/m {flags}", f"vllm serve org/m {flags}")
        for flags in (
            "--served-model-name a b --port 3",
            "--lora-modules a=b c=d",
            "--api-key k1 k2",
            "--cudagraph-capture-sizes 1 2 4",
        )
    ),
    ("vllm serve --enforce-eager=1 org/m -qfp8 -n2", "vllm serve org/m --enforce-eager --quantization fp8 --nnodes 2"),
    ("vllm serve org/m -cc.mode=3 --quantization None", "vllm serve org/m --compilation-config.mode 3"),
    ("vllm serve org/m -sc.method ngram -sc.num_speculative_tokens=3", NGRAM_WORDS),
    ("fastdeploy serve org/m --no-enable-chunked-prefill", "vllm serve org/m --no-enable-chunked-prefill"),
    # Parentheses, ends of lines, containers.
    ("(vllm serve org/m --port 3)", "vllm serve org/m --port 3"),
    ("vllm serve org/m \\\r\n  --port 3\r\n", "vllm serve org/m --port 3"),
    *(
        (f"docker run {flags} image start_server org/m", "vllm serve org/m --tensor-parallel-size 2")
        for flags in (
            "-e MP_NUM=2",
            "-eMP_NUM=2",
            "--env MP_NUM=2",
            "--env=MP_NUM=2 -v a=b",
            "-e=MP_NUM=2 --label MP_NUM=3",
        )
    ),
    (
        "docker run -e MP_NUM=2 image bash -c 'start_server org/m'",
        "vllm serve org/m --tensor-parallel-size 2",
    ),
    (
        "docker run -e MP_NUM=2 -e model_name=org/m image bash -c start_server",
        "vllm serve org/m --tensor-parallel-size 2",
    ),
    # The program is a word of its own.
    ("docker run --name vllm image vllm serve org/m --port 3", "vllm serve org/m --port 3"),
    ("cd /opt/vllm && vllm serve org/m", "vllm serve org/m"),
    ("pkill -f vllm.entrypoints.openai.api_server; /opt/bin/vllm serve org/m", "vllm serve org/m"),
    ("python -m vllm.entrypoints.openai.api_server --model org/m", "vllm serve org/m"),
    ("docker run --rm quay.io/ascend/vllm-ascend:v1 vllm serve org/m", "vllm serve org/m"),
    ("docker run --rm vllm/vllm-openai:latest org/m --port 3", "vllm serve org/m --port 3"),
    (
        "docker run registry/start_server python3 -m rtp_llm.start_server --checkpoint_path org/m",
        "vllm serve org/m",
    ),
    # What stands before it.
    *(
        (f"{wrapper} vllm serve org/m --port 3", "vllm serve org/m --port 3")
        for wrapper in ("numactl --cpunodebind 0 -m 0", "srun --gpus 2 -n 1", "conda run -n env --no-capture-output")
    ),
    ("torchrun --nproc_per_node 2 predictor.py --model_name_or_path org/m", "vllm serve org/m"),
]


@pytest.mark.parametrize(("command", "printed"), SHELL_FORMS)
def test_forms_of_the_shell(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", command]) == 0
    assert capsys.readouterr().out == printed + "\n"


def test_vllm_parses_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.entrypoints.cli.serve import FlexibleArgumentParser, make_arg_parser

    yaml = tmp_path / "ascend.yaml"
    yaml.write_text("model: org/m\ntrust-remote-code: true\nenforce-eager: false\ndisable-log-stats: false\nport: 1\n")
    printed = []
    for arguments in (["--from", "vLLM Ascend", "--yaml", str(yaml)], *([form] for form, _ in SHELL_FORMS)):
        assert main(["migrate", *arguments]) == 0
        printed.append(shlex.split(capsys.readouterr().out.removeprefix("VLLM_PLUGINS=specplus "))[2:])
    assert printed[0] == ["org/m", "--trust-remote-code", "--no-enforce-eager", "--port", "1"]
    parser = make_arg_parser(FlexibleArgumentParser())
    lists = {name[2:] for action in parser._actions if action.nargs == "+" for name in action.option_strings}
    assert lists == vllm_flags().lists
    for words in printed:
        assert parser.parse_args(words).model_tag == "org/m"


def test_lists_and_nulls_of_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = tmp_path / "c.yaml"
    yaml.write_text("served-model-name: [a, b]\nrevision: null\nmiddleware: [x]\nport: 1\n")
    arguments = ["--yaml", str(yaml), f"vllm serve org/m --config {yaml} --port 2"]
    assert main(["migrate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out == "vllm serve org/m --served-model-name a b --middleware x --port 2\n"
    assert "its options were read with --yaml" in err


@pytest.mark.parametrize(
    "value", ["2024-01-01", "2024-99-99", "!!binary aGk=", "&x [*x]", "&x {a: *x}", "[2024-01-01]"]
)
def test_values_of_yaml_that_no_option_has(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = tmp_path / "c.yaml"
    yaml.write_text(f"model: {value}\n")
    assert main(["migrate", "--yaml", str(yaml), "vllm serve org/m"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("malformed YAML: ")
    assert len(err.splitlines()) == 1


def test_lines_of_a_file_of_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = tmp_path / "env"
    lines = ["# It's", "NOTE=it's", "export MP_NUM='2'  # two", 'model_name="org/m"', "SPECULATE_METHOD=None", ""]
    environment.write_text("\r\n".join(lines))
    assert main(["migrate", "--env", str(environment), "start_server"]) == 2
    out, err = capsys.readouterr()
    assert out == "vllm serve org/m --tensor-parallel-size 2\n"
    assert [line for line in err.splitlines() if line[:4] == "miss"] == [
        "missing: NOTE=it's: is no known option of PaddleNLP's"
    ]
    environment.write_text("export MP_NUM=2 BATCH_SIZE=3\n")
    assert main(["migrate", "--env", str(environment), "start_server org/m"]) == 2
    assert "missing: export MP_NUM=2 BATCH_SIZE=3: is no line of NAME=value" in capsys.readouterr().err


def test_a_file_of_variables_that_a_container_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = tmp_path / "env"
    environment.write_text("MP_NUM=2\nBATCH_SIZE=3\n")
    command = f"docker run --env-file {environment} -e BATCH_SIZE=4 image start_server org/m"
    assert main(["migrate", "--env", str(environment), command]) == 0
    out, err = capsys.readouterr()
    assert out == "vllm serve org/m --tensor-parallel-size 2 --max-num-seqs 4\n"
    assert "its variables were read with --env" in err


def test_notes_on_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["migrate", "PORT=22 QUANTIZATION=fp8 fastdeploy serve org/m"])
    assert "note: PORT=22: stays in the environment" in capsys.readouterr().err
    main(["migrate", "numactl --cpunodebind 0 vllm serve org/m"])
    assert "note: numactl --cpunodebind 0: stands before the server" in capsys.readouterr().err
    main(["migrate", "SP_TYPE=none GEN_NUM_PER_CIRCLE=3 CHECKPOINT_PATH=org/m python -m rtp_llm.start_server"])
    err = capsys.readouterr().err
    assert "asks for no speculation" in err
    assert "options mapped" not in err


def test_a_yaml_file_that_the_command_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = tmp_path / "c.yaml"
    yaml.write_text("max_model_len: 32768\n")
    command = f"python -m fastdeploy.entrypoints.openai.api_server --model org/m --config {yaml}"
    assert main(["migrate", command]) == 2
    assert main(["migrate", "--yaml", str(yaml), command]) == 0
    assert "its options were read with --yaml" in capsys.readouterr().err


def test_defaults_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is set under any of its names is not said to be left out."""
    main(["migrate", "python -m fastdeploy.x --model org/m --batch-size 4 --enable-prefix-caching"])
    err = capsys.readouterr().err
    assert "max_num_seqs" not in err
    assert "enable_prefix_caching: left out" not in err
    assert "max_model_len: left out; FastDeploy's default is 2048" in err
    assert "For the same add --max-model-len 2048" in err
    # The image of PaddleNLP has other defaults than its predictor.
    main(["migrate", "SPECULATE_VERIFY_USE_TOPK=1 SPECULATE_METHOD=mtp start_server org/m"])
    out, err = capsys.readouterr()
    assert '"verify_strategy": "greedy"' in out
    assert "For the same add --port 9965" in err
    main(["migrate", "predictor.py --model_name_or_path org/m"])
    assert "9965" not in capsys.readouterr().err


def test_ascend_is_vllm_ascend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--from", "ascend", "program org/m -tp 2"]) == 0
    assert capsys.readouterr().out == "vllm serve org/m --tensor-parallel-size 2\n"


@pytest.mark.parametrize("name", ["paddlenlp", "PaddleNLP", "paddle-nlp"])
def test_a_system_by_any_of_its_spellings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--from", name, "MP_NUM=2 model_name=org/m program"]) == 0
    assert capsys.readouterr().out == "vllm serve org/m --tensor-parallel-size 2\n"


@pytest.mark.parametrize(
    "off", ["SPECULATE_METHOD=None", "SPECULATE_METHOD=NONE", "SP_TYPE=none", "SP_TYPE=NONE", "SP_TYPE=''"]
)
def test_no_speculation(off: str, capsys: pytest.CaptureFixture[str]) -> None:
    system, model = ("PaddleNLP", "model_name") if "SPECULATE" in off else ("RTP-LLM", "CHECKPOINT_PATH")
    assert main(["migrate", "--from", system, f"{off} {model}=org/m program"]) == 0
    assert capsys.readouterr().out == "vllm serve org/m\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["program --x 3"], "nothing tells the system: add --from"),
        (["python -m rtp_llm.start_server --checkpoint_path 'x"], "cannot read the command"),
        (["vllm serve m --api-key $'x'"], "cannot read the command from \"$'x'\" on"),
        (["--env", "/nowhere"], "cannot read /nowhere"),
        (
            ["python -m rtp_llm.start_server --checkpoint_path x --new_flag 3"],
            "missing: new_flag=3: is no known option",
        ),
        (["python -m rtp_llm.start_server --tp_size 3"], "missing: the model is not named"),
        (
            ["python -m rtp_llm.start_server --checkpoint_path x --sp_type oracle"],
            "missing: speculative_config: sp_type",
        ),
        (
            ["python -m fastdeploy.x --model m --speculative-config '{'"],
            "missing: speculative_config: malformed JSON",
        ),
        (["python -m fastdeploy.x --model m --quantization bogus"], "missing: quantization=bogus: vLLM has no such"),
        (["python -m fastdeploy.x --model m --max-model-len"], "missing: max-model-len: has no value"),
        (["python -m fastdeploy.x --model m --router r:1"], "missing: router=r:1: has no counterpart"),
        (["python -m fastdeploy.x --model m -tp 2"], "missing: -tp=2: is no known option"),
        (["vllm serve m --quantization ascend"], "missing: quantization=ascend: vLLM has no such"),
        (["vllm serve m -q wint4"], "missing: -q=wint4: vLLM makes no 4-bit"),
        (["vllm serve m --no-such-flag 3"], "missing: no-such-flag=3: vLLM has no such flag"),
        (["vllm serve m n"], "missing: n: is no option"),
        (["vllm serve m -tp2"], "missing: -tp2: vLLM has no such flag"),
        (["vllm serve m --port"], "missing: port: has no value"),
        (["vllm serve m --host $(hostname -i)"], "missing: $(hostname -i): the shell works it out"),
        (["vllm serve m --host `hostname -i`"], "missing: `hostname -i`: the shell works it out"),
        (['H=a; vllm serve m --host "${H%%x}"'], "missing: ${H%%x}: the shell works it out"),
        (["CHECKPOINT_PATH=$(pwd) python3 -m rtp_llm.start_server"], "missing: CHECKPOINT_PATH=$(pwd): the shell"),
        (
            ['vllm serve m -sc "{\\"method\\": \\"mtp\\", \\"model\\": \\"$H\\"}"'],
            "missing: speculative_config: H is a variable that the command does not set",
        ),
        (
            ["SP_TYPE=eagle SP_CHECKPOINT_PATH=$H CHECKPOINT_PATH=m python3 -m rtp_llm.start_server"],
            "missing: speculative_config: H is a variable that the command does not set",
        ),
        (["vllm serve m -sc '{}' -sc.method ngram"], "missing: -sc.method=ngram: write the whole config as one JSON"),
        (["vllm serve m & vllm serve n"], "missing: vllm is started a second time"),
        (
            ["vllm serve m\n  --port 3"],
            "missing: --port begins a command: a backslash is missing at the end of",
        ),
        (["docker run --env-file f image start_server m"], "missing: --env-file f: read it with --env f"),
        (["docker run --env-file=f image start_server m"], "missing: --env-file f: read it with --env f"),
        (["python3 -m rtp_llm.start_server --checkpoint_path m n"], "missing: n: is no option"),
        (["fastdeploy serve m --port 3 n"], "missing: n: is no option"),
        (
            ["python3 -m rtp_llm.start_server --checkpoint_path m --act_type INT8"],
            "missing: act_type=INT8: vLLM has no such type; its types are",
        ),
        (["vllm serve m --additional-config '{\"draft_window_size\": 3}'"], "missing: additional-config"),
        (
            ["vllm serve m -tp 2 & vllm serve n --port 3 --enforce-eager"],
            "missing: vllm is started a second time",
        ),
    ],
)
def test_what_cannot_be_migrated(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert not err.startswith("speculative_config:")


def test_every_option_says_what_becomes_of_it() -> None:
    for option in OPTIONS.values():
        assert option.target or option.why or option.kind == "model"
