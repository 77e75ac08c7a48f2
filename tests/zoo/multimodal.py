"""Two towers and a contrastive loss."""

from __future__ import annotations

from torch import Tensor

from tests.zoo.registry import ZooModel, images, tokens, zoo_model


@zoo_model("clip")
def clip() -> ZooModel:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=0.1,
        eos_token_id=63,
        bos_token_id=0,
        pad_token_id=1,
    )
    vision = CLIPVisionConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=48,
        patch_size=6,
        attention_dropout=0.1,
    )
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32
    )
    model = CLIPModel(config)

    def batch(i: int) -> dict[str, Tensor]:
        ids = tokens(i, 12, 32, 62)
        ids[:, -1] = 63
        return {"input_ids": ids, "pixel_values": images(i, 12, 48)}

    return ZooModel(model, batch, lambda b: model(**b, return_loss=True).loss)
