"""Tiny versions of published architectures, with random weights and inputs that give a loss.

``ZOO[name]()`` returns ``(model, inputs)``: a Hugging Face model in training mode with the dropout
that its configuration has by default (0.1 where the default is none), and keyword arguments for
which it returns a loss. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Example = tuple[nn.Module, dict[str, Any]]
VOCABULARY, LENGTH, BATCH, IMAGE = 96, 16, 2, 32

# Every text configuration takes these names, by its own or through its attribute map.
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {"intermediate_size": 96, "num_key_value_heads": 2, "attention_dropout": 0.1}
_ENCODER = {"intermediate_size": 96}
_IMAGE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": 5,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2,
       "num_heads": 4, "decoder_start_token_id": 0}  # fmt: skip
_SPEECH = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "ctc_loss_reduction": "mean",
}


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (BATCH, length))


def pixels(size: int = IMAGE) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def _text(model: str, config: str, **options: Any) -> Example:
    """A language model whose labels are its own input."""
    ids = tokens()
    made = getattr(hf, model)(getattr(hf, config)(**{**_TEXT, **options}))
    return made, {"input_ids": ids, "labels": ids}


def _bare(model: str, config: str, **options: Any) -> Example:
    """A language model whose configuration shares no names with the others."""
    ids = tokens()
    made = getattr(hf, model)(getattr(hf, config)(**options))
    return made, {"input_ids": ids, "labels": ids}


def _classifier(model: str, config: str, size: int = IMAGE, **options: Any) -> Example:
    """An image classifier."""
    made = getattr(hf, model)(getattr(hf, config)(**options))
    return made, {"pixel_values": pixels(size), "labels": torch.randint(0, 5, (BATCH,))}


def _translator(model: str, config: str, **options: Any) -> Example:
    made = getattr(hf, model)(getattr(hf, config)(**options))
    return made, {"input_ids": tokens(), "labels": tokens(LENGTH - 4)}


def _speech(model: str, config: str, **options: Any) -> Example:
    made = getattr(hf, model)(getattr(hf, config)(**{**_SPEECH, **options}))
    sound = torch.randn(BATCH, 2000)
    return made, {"input_values": sound, "labels": torch.randint(1, 32, (BATCH, 6))}


def _whisper() -> Example:
    config = hf.WhisperConfig(
        **{**_SEQ2SEQ, "max_source_positions": 24, "max_target_positions": 32},
        num_mel_bins=16,
        activation_dropout=0.1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    sound = torch.randn(BATCH, 16, 48)
    return hf.WhisperForConditionalGeneration(config), {"input_features": sound, "labels": tokens()}


def _two_towers(name: str) -> Example:
    text = {**_TEXT, **_ENCODER, "attention_dropout": 0.1, "projection_dim": 32}
    image = {**_IMAGE, "attention_dropout": 0.1, "projection_dim": 32}
    if name == "Blip":
        text["encoder_hidden_size"] = 64
        # Its default of 1e-10 makes gradients that FP32 cannot hold, with or without units.
        image["initializer_range"] = 0.02
    config = getattr(hf, f"{name}Config")(
        text_config=text, vision_config=image, projection_dim=32, image_text_hidden_size=32
    )
    model = getattr(hf, "BlipForImageTextRetrieval" if name == "Blip" else f"{name}Model")(config)
    inputs: dict[str, Any] = {"input_ids": tokens(), "pixel_values": pixels()}
    if name != "Blip":
        inputs["return_loss"] = True
    return (_Loss(model) if name == "Blip" else model), inputs


class _Loss(nn.Module):
    """Gives a loss to a model that returns none: the mean square of its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        outputs = self.model(**inputs)
        loss = getattr(outputs, "loss", None)
        return outputs[0].square().mean() if loss is None else loss


def _detr() -> Example:
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
            out_features=["stage2"],
        ),
        num_queries=6,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_labels=5,
    )
    boxes = [
        {"class_labels": torch.tensor([1, 3]), "boxes": torch.rand(2, 4) * 0.4 + 0.2}
        for _ in range(BATCH)
    ]
    return hf.DetrForObjectDetection(config), {"pixel_values": pixels(64), "labels": boxes}


def _segformer() -> Example:
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 64],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
        num_labels=5,
    )
    labels = torch.randint(0, 5, (BATCH, 64, 64))
    model = hf.SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": pixels(64), "labels": labels}


def _speecht5() -> Example:
    config = hf.SpeechT5Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=16,
        speaker_embedding_dim=8,
        speech_decoder_prenet_units=32,
        speech_decoder_postnet_units=32,
        max_text_positions=64,
        max_speech_positions=128,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    return hf.SpeechT5ForTextToSpeech(config), {
        "input_ids": tokens(),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "labels": torch.randn(BATCH, 12, 16),
        "speaker_embeddings": torch.randn(BATCH, 8),
    }


def _electra() -> Example:
    model, inputs = _text("ElectraForPreTraining", "ElectraConfig", **_ENCODER, embedding_size=32)
    return model, {**inputs, "labels": torch.randint(0, 2, (BATCH, LENGTH))}


def _case(function: Callable[..., Example], *args: Any, **options: Any) -> Callable[[], Example]:
    def build() -> Example:
        torch.manual_seed(0)
        model, inputs = function(*args, **options)
        return model.train(), inputs

    return build


def _causal(name: str, **options: Any) -> Callable[[], Example]:
    return _case(_text, f"{name}ForCausalLM", f"{name}Config", **options)


def _masked(name: str, **options: Any) -> Callable[[], Example]:
    return _case(_text, f"{name}ForMaskedLM", f"{name}Config", **{**_ENCODER, **options})


def _image(name: str, size: int = IMAGE, **options: Any) -> Callable[[], Example]:
    options = {"num_labels": 5, **options}
    return _case(
        _classifier, f"{name}ForImageClassification", f"{name}Config", size=size, **options
    )


_SWIN = {
    "image_size": IMAGE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

# The architectures that the project promises to be lossless on.
CORE: dict[str, Callable[[], Example]] = {
    "GPT-2": _case(_text, "GPT2LMHeadModel", "GPT2Config", pad_token_id=None),
    "Llama": _causal("Llama", **_GQA),
    "Mistral": _causal("Mistral", **_GQA, sliding_window=8),
    "Qwen3": _causal("Qwen3", **_GQA, head_dim=16),
    "Gemma2": _causal("Gemma2", **_GQA, head_dim=16, sliding_window=8),
    "GPT-NeoX": _causal("GPTNeoX", **_ENCODER, attention_dropout=0.1, hidden_dropout=0.1),
    "OPT": _causal("OPT", ffn_dim=96, word_embed_proj_dim=64),
    "Mixtral": _causal("Mixtral", **_GQA, **_EXPERTS, output_router_logits=True),
    "Mamba": _causal("Mamba", state_size=8, intermediate_size=128),
    "BERT": _masked("Bert"),
    "DistilBERT": _masked("DistilBert", hidden_dim=96),
    "T5": _case(_translator, "T5ForConditionalGeneration", "T5Config", **_T5),
    "BART": _case(_translator, "BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ),
    "Whisper": _case(_whisper),
    "ViT": _image("ViT", **_IMAGE),
    "DeiT": _image("DeiT", **_IMAGE),
    "Swin": _image("Swin", **_SWIN),
    "ResNet": _image("ResNet", **_STAGES, layer_type="bottleneck"),
    "ConvNeXt": _image("ConvNext", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2,
                       drop_path_rate=0.1),
    "Wav2Vec2": _case(_speech, "Wav2Vec2ForCTC", "Wav2Vec2Config"),
}  # fmt: skip

# And a look beyond them.
MORE: dict[str, Callable[[], Example]] = {
    "Phi": _causal("Phi", **_GQA),
    "Phi3": _causal("Phi3", **_GQA),
    "Falcon": _causal("Falcon", hidden_dropout=0.1, attention_dropout=0.1),
    "Bloom": _causal("Bloom", hidden_dropout=0.1, attention_dropout=0.1),
    "MPT": _causal("Mpt", emb_pdrop=0.1, resid_pdrop=0.1),
    "GPT-J": _causal("GPTJ", rotary_dim=8),
    "GPT-Neo": _causal("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=8),
    "GPTBigCode": _causal("GPTBigCode"),
    "CodeGen": _causal("CodeGen", rotary_dim=8),
    "StarCoder2": _causal("Starcoder2", **_GQA),
    "Qwen2": _causal("Qwen2", **_GQA),
    "Qwen2-MoE": _causal("Qwen2Moe", **_GQA, **_EXPERTS),
    "Qwen3-MoE": _causal("Qwen3Moe", **_GQA, **_EXPERTS, head_dim=16),
    "OLMoE": _causal("Olmoe", **_GQA, **_EXPERTS),
    "DeepSeek-V3": _causal("DeepseekV3", **{**_GQA, "num_key_value_heads": 4}, n_routed_experts=4,
                           num_experts_per_tok=2, moe_intermediate_size=32, n_group=2,
                           topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
                           qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
    "GPT-OSS": _causal("GptOss", **_GQA, **_EXPERTS, head_dim=16, sliding_window=8),
    "Llama4": _case(_text, "Llama4ForCausalLM", "Llama4TextConfig", **_GQA, **_EXPERTS, head_dim=16,
                    intermediate_size_mlp=96, attention_chunk_size=8),
    "Gemma": _causal("Gemma", **_GQA, head_dim=16),
    "Gemma3": _case(_text, "Gemma3ForCausalLM", "Gemma3TextConfig", **_GQA, head_dim=16,
                    sliding_window=8),
    "Cohere": _causal("Cohere", **_GQA),
    "OLMo": _causal("Olmo", **_GQA),
    "OLMo2": _causal("Olmo2", **_GQA),
    "StableLM": _causal("StableLm", **_GQA),
    "Granite": _causal("Granite", **_GQA),
    "GLM": _causal("Glm", **_GQA, head_dim=16),
    "Nemotron": _causal("Nemotron", **_GQA),
    "Mamba2": _causal("Mamba2", state_size=16, head_dim=16, num_heads=8, n_groups=2, chunk_size=8),
    "FalconMamba": _causal("FalconMamba", state_size=8, intermediate_size=128),
    "Jamba": _causal("Jamba", **_GQA, num_experts=2, mamba_d_state=8, attn_layer_period=2,
                     attn_layer_offset=1, expert_layer_period=2, use_mamba_kernels=False),
    "RWKV": _case(_text, "RwkvForCausalLM", "RwkvConfig", attention_hidden_size=64,
                  intermediate_size=96, context_length=64),
    "RecurrentGemma": _causal("RecurrentGemma", **_GQA, lru_width=64, attention_window_size=8,
                              num_hidden_layers=3, use_cache=False),
    "RoBERTa": _masked("Roberta"),
    "ALBERT": _masked("Albert", embedding_size=32, hidden_dropout_prob=0.1,
                      attention_probs_dropout_prob=0.1),
    "ELECTRA": _case(_electra),
    "DeBERTa-v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"],
                          position_buckets=8),
    "MPNet": _masked("MPNet"),
    "ModernBERT": _masked("ModernBert", attention_dropout=0.1, local_attention=8, cls_token_id=1,
                          sep_token_id=2),
    "XLNet": _case(_bare, "XLNetLMHeadModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=64,
                   n_layer=2, n_head=4, d_inner=96),
    "Longformer": _masked("Longformer", attention_window=8),
    "BigBird": _masked("BigBird", attention_type="original_full"),
    "FNet": _masked("FNet"),
    "Funnel": _case(_bare, "FunnelForMaskedLM", "FunnelConfig", vocab_size=VOCABULARY,
                    block_sizes=[1, 1], d_model=64, n_head=4, d_head=16, d_inner=96),
    "Nystromformer": _masked("Nystromformer", num_landmarks=4, segment_means_seq_len=LENGTH),
    "ConvBERT": _masked("ConvBert", embedding_size=64, conv_kernel_size=5),
    "Pegasus": _case(_translator, "PegasusForConditionalGeneration", "PegasusConfig", **_SEQ2SEQ),
    "MarianMT": _case(_translator, "MarianMTModel", "MarianConfig", **_SEQ2SEQ),
    "mT5": _case(_translator, "MT5ForConditionalGeneration", "MT5Config", **_T5),
    "LED": _case(_translator, "LEDForConditionalGeneration", "LEDConfig",
                 **{**_SEQ2SEQ, "attention_window": 8}, max_encoder_position_embeddings=64,
                 max_decoder_position_embeddings=64),
    "CLIP": _case(_two_towers, "CLIP"),
    "SigLIP": _case(_two_towers, "Siglip"),
    "BLIP": _case(_two_towers, "Blip"),
    "BEiT": _image("Beit", **_IMAGE, use_relative_position_bias=True),
    "DINOv2": _image("Dinov2", **_IMAGE),
    "SwinV2": _image("Swinv2", **_SWIN),
    "PVT": _image("Pvt", size=64, image_size=64, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1],
                  num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2, 2, 2, 2],
                  hidden_dropout_prob=0.1),
    "CvT": _image("Cvt", embed_dim=[16, 16, 32], num_heads=[1, 1, 2], depth=[1, 2, 3],
                  attention_drop_rate=[0.1, 0.1, 0.1], drop_rate=[0.1, 0.1, 0.1]),
    "ConvNeXtV2": _image("ConvNextV2", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2,
                         drop_path_rate=0.1),
    "MobileNetV1": _image("MobileNetV1", depth_multiplier=0.25),
    "MobileNetV2": _image("MobileNetV2", depth_multiplier=0.25),
    "MobileViT": _image("MobileViT", size=64, image_size=64, hidden_sizes=[16, 24, 32],
                        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], num_attention_heads=2),
    "EfficientNet": _image("EfficientNet", width_coefficient=0.25, depth_coefficient=0.2,
                           image_size=IMAGE, hidden_dim=320, depthwise_padding=[],
                           initializer_range=0.2),
    "RegNet": _image("RegNet", **_STAGES, groups_width=8),
    "LeViT": _image("Levit", size=64, image_size=64, hidden_sizes=[32, 48, 64],
                    num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8],
                    mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2]),
    "PoolFormer": _image("PoolFormer", hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2,
                         patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
    "SegFormer": _case(_segformer),
    "DETR": _case(_detr),
    "Hubert": _case(_speech, "HubertForCTC", "HubertConfig"),
    "WavLM": _case(_speech, "WavLMForCTC", "WavLMConfig", num_buckets=16, max_bucket_distance=32),
    "SpeechT5": _case(_speecht5),
}  # fmt: skip

ZOO: dict[str, Callable[[], Example]] = {**CORE, **MORE}
