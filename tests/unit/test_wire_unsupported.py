"""A parameter of a well-known server is ours, is refused by name, or changes no answer: none passes in silence."""

from dataclasses import fields
from typing import Any

import pytest

from wsbatch.errors import BadRequest
from wsbatch.messages import ChatMessage, GenerateRequest, SamplingParams
from wsbatch.wire.fields import WireLimits
from wsbatch.wire.frames import ClientFrames
from wsbatch.wire.unsupported import IN_MESSAGE, PARAMETERS, SURROUNDING, TUNING

OURS = {spec.name for cls in (GenerateRequest, SamplingParams) for spec in fields(cls)}
READ = ClientFrames(WireLimits()).read

SERVERS = {
    "OpenAI chat completions": """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
        metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
        stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options""",
    "OpenAI completions": """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream
        stream_options suffix temperature top_p user""",
    "OpenAI responses": """
        background context_management conversation include input instructions max_output_tokens max_tool_calls metadata
        model parallel_tool_calls previous_response_id prompt_cache_key reasoning safety_identifier service_tier store
        stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user""",
    "vLLM": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message detokenize documents echo extra_args flat_logprobs guided_choice
        guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
        include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logits_processors
        logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_embeds prompt_logprobs
        reasoning_effort repetition_detection repetition_penalty request_id return_token_ids return_tokens_as_token_ids
        skip_special_tokens spaces_between_special_tokens stop_token_ids structural_tag structured_outputs
        thinking_token_budget top_k trace_decode_token_ids truncate_prompt_tokens truncation_side use_beam_search
        vllm_xargs watermarking""",
    "TGI": """
        adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar inputs max_new_tokens
        parameters repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p
        watermark""",
    "SGLang": """
        audio_data bootstrap_host bootstrap_port bootstrap_room continue_final_message custom_logit_processor
        custom_params data_parallel_rank ebnf image_data input_embeds input_ids json_schema logprob_start_len lora_path
        max_new_tokens min_new_tokens modalities no_stop_trim regex return_hidden_states return_logprob
        return_text_in_logprobs rid sampling_params sampling_seed separate_reasoning session_params stop_regex
        stream_reasoning structural_tag task text token_ids_logprob top_logprobs_num video_data""",
    "llama.cpp": """
        adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base dry_multiplier
        dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range frequency_penalty grammar grammar_lazy
        grammar_triggers id_slot ignore_eos image_data input_extra input_prefix input_suffix json_schema logit_bias lora
        min_keep min_p mirostat mirostat_eta mirostat_tau multimodal_data n_cache_reuse n_cmpl n_discard n_indent n_keep
        n_predict n_probs parse_tool_calls penalize_nl post_sampling_probs presence_penalty preserved_tokens
        reasoning_format repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
        system_prompt t_max_predict_ms tfs_z thinking_forced_open timings_per_token top_k top_n_sigma typical_p
        xtc_probability xtc_threshold""",
    "Ollama": """
        context format frequency_penalty images keep_alive logprobs main_gpu min_p mirostat mirostat_eta mirostat_tau
        num_batch num_ctx num_gpu num_keep num_predict num_thread numa options penalize_newline presence_penalty raw
        repeat_last_n repeat_penalty seed stop suffix system temperature template tfs_z think tools top_k top_logprobs
        top_p typical_p use_mmap""",
    "Transformers": """
        add_generation_prompt assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
        assistant_lookbehind bad_words_ids begin_suppress_tokens bos_token_id cache_config cache_implementation
        chat_template clean_up_tokenization_spaces compile_config constraints continue_final_message
        continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample documents
        dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff
        eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_decoder_ids
        forced_eos_token_id generation_config guidance_scale is_assistant length_penalty low_memory max_cache_len
        max_length max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p negative_prompt_ids
        no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
        num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id padding
        penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
        repetition_penalty return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens
        target_lookbehind temperature token_healing tools top_h top_k top_p transformers_version truncation typical_p
        use_cache use_mtp watermarking_config""",
    "text-generation-webui": """
        adaptive_decay adaptive_target add_bos_token auto_max_new_tokens ban_eos_token bot_name character
        chat_instruct_command chat_template_str context continue_ custom_token_bans do_sample dry_allowed_length
        dry_base dry_multiplier dry_sequence_breakers dynamic_temperature dynatemp_exponent dynatemp_high dynatemp_low
        enable_thinking encoder_repetition_penalty epsilon_cutoff eta_cutoff grammar_string greeting guidance_scale
        impersonate instruction_template instruction_template_str max_tokens_second min_p mirostat_eta mirostat_mode
        mirostat_tau mode name1 name2 negative_prompt no_repeat_ngram_size penalty_alpha preset prompt_lookup_num_tokens
        reasoning_effort repetition_penalty repetition_penalty_range sampler_priority skip_special_tokens
        smoothing_curve smoothing_factor static_cache temperature_last tfs top_a top_n_sigma truncation_length typical_p
        user_bio user_name xtc_probability xtc_threshold""",
    "koboldcpp": """
        adapter adaptive_decay adaptive_target banned_strings banned_tokens bypass_eos dry_allowed_length dry_base
        dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range frmtadsnsp frmtrmblln
        frmtrmspch frmttriminc genkey grammar grammar_retain_state images logit_bias logprobs max_context_length
        max_length memory min_p mirostat mirostat_eta mirostat_tau n negative_prompt nsigma presence_penalty prompt
        quiet render_special rep_pen rep_pen_range rep_pen_slope replace_instruct_placeholders sampler_order
        sampler_seed singleline smoothing_curve smoothing_factor stop_sequence temperature tfs top_a top_k top_p
        trim_stop typical use_authors_note use_default_badwordsids use_memory use_story use_world_info xtc_probability
        xtc_threshold""",
    "TensorRT-LLM and Triton": """
        add_special_tokens apply_batched_logits_processor bad bad_token_ids bad_words beam_search_diversity_rate
        beam_width beam_width_array decoder_text_input detokenize early_stopping embedding_bias embedding_bias_weights
        embedding_bias_words end_id exclude_input_from_output exclude_input_in_output frequency_penalty guided_decoding
        image_input include_stop_str_in_output len_penalty length_penalty logits_processor lora_config lora_task_id
        lora_weights max_tokens min_length min_tokens no_repeat_ngram_size num_draft_tokens num_return_sequences pad_id
        prompt_embedding_table prompt_ignore_length random_seed repetition_penalty request_output_len
        return_context_logits return_encoder_output return_generation_logits return_log_probs return_perf_metrics
        runtime_top_k runtime_top_p seed stop_words temperature text_input top_k top_p top_p_decay top_p_min
        top_p_reset_ids truncate_prompt_tokens""",
    "LMDeploy": """
        adapter_name bad_token_ids bad_words do_preprocess do_sample enable_thinking ignore_eos
        include_stop_str_in_output interactive_mode logits_processors logprobs max_new_tokens media_io_kwargs
        min_new_tokens min_p mm_processor_kwargs output_last_hidden_state output_logits random_seed
        repetition_ngram_size repetition_ngram_threshold repetition_penalty response_format session_id
        skip_special_tokens spaces_between_special_tokens stop_token_ids stop_words top_k""",
    "Aphrodite": """
        custom_token_bans dry_allowed_length dry_base dry_early_exit_match_len dry_max_ngram dry_max_occurrences
        dry_multiplier dry_range dry_sequence_breaker_ids dynatemp_exponent dynatemp_max dynatemp_min epsilon_cutoff
        eta_cutoff guided_decoding min_p mirostat_eta mirostat_mode mirostat_tau no_repeat_ngram_size nsigma
        sampler_priority skew smoothing_curve smoothing_factor temperature_last tfs token_ban_ranges top_a typical_p
        xtc_probability xtc_threshold""",
    "Mistral": """
        document_image_limit document_page_limit frequency_penalty guardrails max_tokens n parallel_tool_calls
        prediction presence_penalty prompt_mode random_seed reasoning_effort response_format safe_prompt stop suffix
        tool_choice tools top_p""",
    "Anthropic": """
        cache_control container context_management inference_geo max_tokens max_tokens_to_sample mcp_servers messages
        metadata output_config output_format service_tier stop_sequences system temperature thinking tool_choice tools
        top_k top_p""",
    "Cohere": """
        chat_history citation_mode citation_options citation_quality connectors conversation_id documents end_sequences
        force_single_step frequency_penalty k logprobs max_input_tokens max_tokens message num_generations p preamble
        presence_penalty preset prompt_truncation raw_prompting response_format return_likelihoods return_prompt
        safety_mode search_queries_only seed stop_sequences strict_tools temperature thinking tool_choice tool_results
        tools truncate""",
    "Gemini": """
        audioTimestamp cachedContent candidateCount contents enableEnhancedCivicAnswers frequencyPenalty
        generationConfig imageConfig logprobs maxOutputTokens mediaResolution presencePenalty responseJsonSchema
        responseLogprobs responseMimeType responseModalities responseSchema routingConfig safetySettings seed
        speechConfig stopSequences systemInstruction temperature thinkingConfig toolConfig tools topK topP""",
}

# What may pass, and what it is about: no answer changes with it here.
PASSES = {
    "who asks, and the book-keeping of it": """
        model user metadata store safety_identifier request_id rid genkey quiet details session_id cache_control""",
    "where it runs and how fast": """
        service_tier inference_geo background prompt_cache_key prompt_cache_retention cache_prompt cache_salt keep_alive
        id_slot prediction kv_transfer_params data_parallel_rank bootstrap_host bootstrap_port bootstrap_room
        backend_sampling n_cache_reuse num_batch num_gpu main_gpu num_thread numa use_mmap max_tokens_second
        prompt_lookup_num_tokens static_cache num_draft_tokens routingConfig apply_batched_logits_processor""",
    "the shape of the answer, or details in it: all ids and usage are there": """
        stream_options include flat_logprobs return_token_ids logprob_start_len return_tokens return_progress
        response_fields timings_per_token return_perf_metrics stream_reasoning enableEnhancedCivicAnswers""",
    "tools, a grammar, documents or media, which are refused themselves": """
        parallel_tool_calls max_tool_calls strict_tools parse_tool_calls grammar_lazy grammar_triggers preserved_tokens
        grammar_retain_state guided_decoding_backend guided_whitespace_pattern document_image_limit document_page_limit
        mediaResolution audioTimestamp""",
    "how transformers computes, and what it pads with": """
        transformers_version assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
        assistant_lookbehind cache_config cache_implementation compile_config continuous_batching_config disable_compile
        is_assistant low_memory max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
        pad_id pad_token_id padding prefill_chunk_size return_dict_in_generate speculation_type target_lookbehind
        use_cache use_mtp""",
}


def words(*texts: str) -> set[str]:
    return {word for text in texts for word in text.split()}


def asked(**parameters: Any) -> dict[str, Any]:
    return {"type": "generate", "id": 1, "prompt": "x"} | parameters


@pytest.mark.parametrize("server", SERVERS)
def test_no_parameter_of_another_server_passes_in_silence(server: str) -> None:
    for name in words(SERVERS[server]) - OURS - words(*PASSES.values()):
        READ(asked(**{name: None}))
        with pytest.raises(BadRequest, match=rf"^{name}: is not supported \(got 'x'\)"):
            READ(asked(**{name: "x"}))


def test_what_passes_is_a_parameter_of_some_server_and_has_no_effect() -> None:
    for name in words(*PASSES.values()):
        assert name in words(*SERVERS.values())
        assert READ(asked(**{name: "x"})) == GenerateRequest(id=1, prompt="x")


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: f"{row.names:.20}")
def test_a_value_that_asks_for_nothing_passes(row: Any) -> None:
    for name in row.names.split():
        for value in row.neutral:
            assert READ(asked(**{name: value})) == GenerateRequest(id=1, prompt="x")
        booleans = [value for value in (True, False) if not any(value is none for none in row.neutral)]
        for value in (*booleans, 2, {"a": 1}, ["a"], "x", float("nan")):
            with pytest.raises(BadRequest, match=f"^{name}: is not supported"):
                READ(asked(**{name: value}))


@pytest.mark.parametrize("switches", TUNING)
def test_what_tunes_a_parameter_passes_beside_one_that_is_off(switches: str) -> None:
    for name in TUNING[switches].split():
        with pytest.raises(BadRequest, match=f"^{name}: is not supported"):
            READ(asked(**{name: 1}))
        for switch in switches.split():
            row = next(row for row in PARAMETERS if switch in row.names.split())
            READ(asked(**{name: 1, switch: row.neutral[0]}))
            with pytest.raises(BadRequest, match="is not supported"):
                READ(asked(**{name: 1, switch: 2}))


@pytest.mark.parametrize("name", SURROUNDING.split())
def test_what_is_put_around_the_text_is_not_to_be_changed(name: str) -> None:
    chat = {"type": "generate", "id": 1, "messages": [{"role": "user", "content": "x"}]}
    READ(asked(**{name: True}))
    READ(chat | {name: False})
    for frame in (asked(**{name: False}), chat | {name: True}):
        with pytest.raises(BadRequest, match=f"^{name}: is not supported"):
            READ(frame)


@pytest.mark.parametrize("name", sorted(name for name in OURS if "_" in name))
def test_our_own_names_in_camel_case(name: str) -> None:
    head, *rest = name.split("_")
    camel = head + "".join(map(str.capitalize, rest))
    with pytest.raises(BadRequest, match=f"^{camel}: is not supported .*; use {name}$"):
        READ(asked(**{camel: 1}))


@pytest.mark.parametrize("row", IN_MESSAGE)
def test_no_key_of_a_message_passes_in_silence(row: Any) -> None:
    def chat(**keys: object) -> dict[str, object]:
        return {"type": "generate", "id": 1, "messages": [{"role": "user", "content": "x"} | keys]}

    for name in row.names.split():
        for value in (*row.neutral, None):
            request = READ(chat(**{name: value}))
            assert isinstance(request, GenerateRequest)
            assert request.messages == (ChatMessage("user", "x"),)
        for value in ("x", ["x"], {"x": 1}, 2):
            with pytest.raises(BadRequest, match=rf"^messages\[0\]\.{name}: is not supported"):
                READ(chat(**{name: value}))
