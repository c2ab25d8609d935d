"""Parameters of other servers that this one does not have: refused by name, so that none is silently without effect.

A key that nobody uses is ignored. A key below is one that a client may have set in the belief that it works, and whose
silent loss would change what is generated; it passes only with a value that asks for nothing. The rows are those of the
tables in docs/protocol.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import NamedTuple

from wsbatch.errors import BadRequest
from wsbatch.messages import GenerateRequest, SamplingParams
from wsbatch.wire.fields import shown


class Row(NamedTuple):
    """Parameters that are refused alike.

    Attributes:
        what: they change, or the field to use instead as `use …`.
        neutral: the values that ask for nothing.
        names: separated by spaces.
    """

    what: str
    neutral: tuple[object, ...]
    names: str


EMPTY: tuple[object, ...] = ("", [], {})

PARAMETERS = (
    Row(
        "the distribution",
        (0,),
        "presence_penalty frequency_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size repetition_ngram_size"
        " repetition_ngram_threshold min_p top_a epsilon_cutoff eta_cutoff mirostat mirostat_mode xtc_probability"
        " dry_multiplier dynatemp_range dynatemp_min dynatemp_max smoothing_factor penalty_alpha nsigma skew min_keep",
    ),
    Row(
        "the distribution",
        (1,),
        "repetition_penalty repeat_penalty rep_pen encoder_repetition_penalty typical_p typical tfs tfs_z"
        " guidance_scale cfg_scale",
    ),
    Row("the distribution", (-1, 0), "top_n_sigma adaptive_target"),
    Row(
        "the distribution",
        (False,),
        "dynamic_temperature temperature_last watermark watermarking renormalize_logits remove_invalid_values"
        " token_healing",
    ),
    Row(
        "the distribution",
        EMPTY,
        "logit_bias logits_processors logits_processor custom_logit_processor bad bad_words bad_words_ids bad_token_ids"
        " banned_tokens banned_strings banned_phrases custom_token_bans token_ban_ranges allowed_token_ids"
        " suppress_tokens begin_suppress_tokens sequence_bias force_words_ids forced_decoder_ids constraints"
        " embedding_bias embedding_bias_words embedding_bias_weights negative_prompt negative_prompt_ids"
        " sampler_priority custom_params extra_args vllm_xargs",
    ),
    Row(
        "the distribution",
        (),
        "top_h top_p_min top_p_decay top_p_reset_ids dola_layers samplers sampler_order forced_bos_token_id"
        " forced_eos_token_id exponential_decay_length_penalty watermarking_config trace_decode_token_ids preset",
    ),
    Row(
        "several answers, searches",
        (1,),
        "n best_of n_cmpl num_return_sequences num_generations candidate_count num_beams num_beam_groups beam_width"
        " length_penalty len_penalty",
    ),
    Row("several answers, searches", (0,), "diversity_penalty beam_search_diversity_rate"),
    Row("several answers, searches", (False,), "use_beam_search beam_search early_stopping"),
    Row("several answers, searches", (), "beam_width_array"),
    Row("the answer's form", ({"type": "text"},), "response_format"),
    Row("the answer's form", ("text/plain",), "response_mime_type"),
    Row("the answer's form", (["text"],), "modalities response_modalities"),
    Row("the answer's form", ("none", "auto"), "tool_choice function_call"),
    Row(
        "the answer's form",
        EMPTY,
        "grammar grammar_string ebnf regex format json_schema structural_tag tools functions tool_results tool_config"
        " mcp_servers connectors plugins suffix",
    ),
    Row(
        "the answer's form",
        (),
        "guided_json guided_json_object guided_regex guided_choice guided_grammar guided_decoding structured_outputs"
        " response_schema response_json_schema output_format output_config output_schema text audio speech_config"
        " image_config web_search_options enable_search citation_options citation_quality citation_mode",
    ),
    Row(
        "the answer's form",
        (False,),
        "echo return_full_text return_prompt decoder_input_details return_text_in_logprobs"
        " post_sampling_probs json_mode render_special separate_reasoning singleline frmttriminc frmtrmblln frmtrmspch"
        " frmtadsnsp clean_up_tokenization_spaces return_tokens_as_token_ids return_hidden_states"
        " return_context_logits return_generation_logits return_encoder_output output_hidden_states output_attentions"
        " output_scores output_logits output_last_hidden_state",
    ),
    Row(
        "the answer's form",
        (True,),
        "skip_special_tokens spaces_between_special_tokens detokenize exclude_input_in_output"
        " exclude_input_from_output trim_stop include_reasoning",
    ),
    Row("the answer's form", (0, False), "prompt_logprobs"),
    Row(
        "how much the model thinks",
        (),
        "think thinking thinking_config thinking_budget thinking_token_budget enable_thinking thinking_forced_open"
        " reasoning reasoning_effort reasoning_format reasoning_budget reasoning_budget_tokens effort verbosity"
        " prompt_mode",
    ),
    Row("length and stopping", (0,), "min_tokens min_new_tokens min_length n_indent n_keep n_discard num_keep"),
    Row("length and stopping", (False,), "include_stop_str_in_output no_stop_trim auto_max_new_tokens"),
    Row("length and stopping", EMPTY, "stop_regex repetition_detection"),
    Row(
        "the prompt",
        EMPTY,
        "images image image_data image_input videos video_data audio_data audios multi_modal_data multimodal_data files"
        " attachments documents chat_template_kwargs mm_processor_kwargs media_io_kwargs input_prefix input_suffix"
        " input_extra memory context chat_history lora",
    ),
    Row(
        "the prompt",
        (),
        "chat_template chat_template_str template instruction_template instruction_template_str chat_instruct_command"
        " character greeting bot_name user_name user_bio name1 name2 prompt_embeds input_embeds inputs_embeds"
        " prompt_embedding_table prompt_ignore_length decoder_start_token_id decoder_text_input bos_token_id"
        " conversation conversation_id previous_response_id session_params container cached_content context_management"
        " safety_mode safety_settings moderation guardrails task",
    ),
    Row(
        "the prompt's length",
        (),
        "truncate_prompt_tokens truncate truncation_side prompt_truncation num_ctx max_context_length max_input_tokens",
    ),
    Row("the prompt's length", ("disabled", False), "truncation"),
    Row("the prompt's length", (0,), "truncation_length"),
    Row("the prompt", ("instruct",), "mode"),
    Row(
        "the prompt",
        (False,),
        "continue_final_message continue_ continue impersonate safe_prompt raw_prompting search_queries_only"
        " force_single_step replace_instruct_placeholders interactive_mode use_memory use_story use_authors_note"
        " use_world_info",
    ),
    Row("the prompt", (True,), "add_generation_prompt raw do_preprocess"),
    Row(
        "the weights",
        (),
        "adapter adapter_id adapter_name adapter_source lora_path lora_name lora_request lora_config lora_task_id"
        " lora_weights",
    ),
    Row(
        "use its fields beside `id`",
        EMPTY,
        "parameters params options sampling_params generation_config inference_config generate_kwargs extra_body",
    ),
    Row("use `prompt`", (), "input inputs text_input message"),
    Row("use `token_ids`", (), "input_ids prompt_token_ids"),
    Row("use `messages`", EMPTY, "system system_prompt system_instruction instructions preamble contents"),
    Row(
        "use `max_tokens`",
        (),
        "max_new_tokens max_completion_tokens max_output_tokens max_tokens_to_sample max_length max_gen_len n_predict"
        " num_predict request_output_len",
    ),
    Row("use `temperature`", (), "temp do_sample"),
    Row("use `top_p`", (), "p runtime_top_p"),
    Row("use `top_k`", (), "k runtime_top_k"),
    Row("use `seed`", (-1,), "random_seed sampling_seed sampler_seed"),
    Row("use `stop`", EMPTY, "stop_sequences stop_sequence stop_strings stop_words end_sequences"),
    Row("use `stop_token_ids`", (), "eos_token_id end_id"),
    Row("use `ignore_eos`", (False,), "ban_eos_token bypass_eos use_default_badwordsids"),
    Row(
        "use `logprobs`",
        (0, False),
        "top_logprobs top_logprobs_num top_n_tokens n_probs return_logprob return_log_probs response_logprobs",
    ),
    Row("use `logprobs`", (), "return_likelihoods logprob_token_ids token_ids_logprob"),
    Row("use `timeout_ms`", (0, -1), "max_time t_max_predict_ms"),
)

# What tunes a parameter above: refused unless one of these is there and asks for nothing.
TUNING = {
    "repetition_penalty repeat_penalty rep_pen": "repetition_penalty_range repeat_last_n penalty_last_n rep_pen_range"
    " rep_pen_slope penalize_nl penalize_newline penalty_prompt",
    "mirostat mirostat_mode": "mirostat_tau mirostat_eta",
    "dry_multiplier": "dry_base dry_allowed_length dry_penalty_last_n dry_range dry_sequence_breakers"
    " dry_sequence_breaker_ids dry_max_ngram dry_max_occurrences dry_early_exit_match_len",
    "xtc_probability": "xtc_threshold",
    "dynatemp_range dynamic_temperature": "dynatemp_low dynatemp_high dynatemp_exponent",
    "smoothing_factor": "smoothing_curve",
    "adaptive_target": "adaptive_decay",
}

# Whether tokens such as BOS are put around the text: around a prompt they are, and a chat template has its own.
SURROUNDING = "add_special_tokens add_bos_token"

IN_MESSAGE = (
    Row(
        "",
        EMPTY,
        "name tool_calls tool_call_id tool_name tool_plan function_call tools images audio videos files attachments"
        " documents citations annotations refusal reasoning reasoning_content reasoning_details thinking",
    ),
    Row("", (False,), "prefix partial"),
)


def _by_name(rows: Iterable[Row]) -> dict[str, Row]:
    return {name: row for row in rows for name in row.names.split()}


def _camel_case(name: str) -> str:
    head, *rest = name.strip("_").split("_")
    return head + "".join(map(str.capitalize, rest))


_ROWS = _by_name(PARAMETERS)
_SWITCHES = {name: switches.split() for switches, names in TUNING.items() for name in names.split()}
_KNOWN = {*_ROWS, *_SWITCHES, *SURROUNDING.split()}
_OWN = {spec.name for cls in (GenerateRequest, SamplingParams) for spec in fields(cls)}
# In camelCase they are other servers' names too, and so are our own.
_SPELLED = {_camel_case(name): name for name in _KNOWN | _OWN} | {name: name for name in _KNOWN}
REFUSED = frozenset(_SPELLED.keys() - _OWN)
_ROWS_IN_MESSAGE = _by_name(IN_MESSAGE)


def refuse_unsupported(frame: Mapping[str, object]) -> None:
    """Raise BadRequest naming a parameter that would have no effect. Null always passes."""
    for spelled in sorted(frame.keys() & REFUSED):
        name, value = _SPELLED[spelled], frame[spelled]
        if name in _OWN:
            _refuse(spelled, value, (), f"use `{name}`")
        elif name in _SWITCHES:
            if not any(_off(frame.get(switch), _ROWS[switch]) for switch in _SWITCHES[name]):
                _refuse(spelled, value, (), "")
        elif name in _ROWS:
            _refuse(spelled, value, _ROWS[name].neutral, _ROWS[name].what)
        else:
            _refuse(spelled, value, ("prompt" in frame,), "")


def refuse_in_message(prefix: str, message: Mapping[str, object]) -> None:
    """The same for the keys of one of `messages`, which is called `prefix`."""
    for name in sorted(message.keys() & _ROWS_IN_MESSAGE.keys()):
        _refuse(f"{prefix}.{name}", message[name], _ROWS_IN_MESSAGE[name].neutral, "")


def _refuse(name: str, value: object, neutral: Iterable[object], what: str) -> None:
    if value is None or any(_same(value, none) for none in neutral):
        return
    hint = f"; {what.replace('`', '')}" if what.startswith("use ") else ""
    raise BadRequest(f"{name}: is not supported (got {shown(value)}){hint}")


def _off(value: object, row: Row) -> bool:
    return value is not None and any(_same(value, none) for none in row.neutral)


def _same(value: object, neutral: object) -> bool:
    # 1 == True in Python; on the wire they are different values.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
