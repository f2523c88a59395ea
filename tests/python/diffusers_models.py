# SPDX-License-Identifier: Apache-2.0
"""Video transformers of diffusers, of random weights and a few hundred tokens, and whole pipelines of them."""

import diffusers
import torch


def wan(image=False):
    torch.manual_seed(0)
    more = {"image_dim": 24, "added_kv_proj_dim": 32} if image else {}
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **more,
    )

    def inputs(seed, timestep):
        generator = torch.Generator().manual_seed(seed)
        given = {
            "hidden_states": torch.randn(1, 4, 3, 16, 16, generator=generator),
            "timestep": torch.tensor([timestep]),
            "encoder_hidden_states": torch.randn(1, 512 if image else 7, 16, generator=generator),
        }
        if image:
            given["encoder_hidden_states_image"] = torch.randn(1, 5, 24, generator=generator)
        return given

    return model.eval(), inputs


def wan_with_an_image():
    return wan(True)


def hunyuan():
    """Texts of 9 tokens, of which the two sequences have 4 and 7: their lengths come as a mask."""
    torch.manual_seed(0)
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )

    def inputs(seed, timestep):
        generator = torch.Generator().manual_seed(seed)
        return {
            "hidden_states": torch.randn(2, 4, 3, 16, 16, generator=generator),
            "timestep": torch.tensor([timestep] * 2),
            "encoder_hidden_states": torch.randn(2, 9, 16, generator=generator),
            "encoder_attention_mask": (torch.arange(9) < torch.tensor([[4], [7]])).long(),
            "pooled_projections": torch.randn(2, 8, generator=generator),
            "guidance": torch.tensor([6.0, 6.0]),
        }

    return model.eval(), inputs


def cogvideox():
    torch.manual_seed(0)
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=16,
        sample_height=16,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=9,
    )

    def inputs(seed, timestep):
        generator = torch.Generator().manual_seed(seed)
        return {
            "hidden_states": torch.randn(2, 3, 4, 16, 16, generator=generator),
            "timestep": torch.tensor([timestep] * 2),
            "encoder_hidden_states": torch.randn(2, 9, 16, generator=generator),
        }

    return model.eval(), inputs


def _texts(tokens):
    generator = torch.Generator().manual_seed(7)
    names = ("prompt_embeds", "negative_prompt_embeds")
    return {name: torch.randn(1, tokens, 16, generator=generator) for name in names}


def wan_pipeline(experts=1):
    """A pipeline, and what a call of it wants; two experts share a run as those of Wan 2.2 do."""
    models = [wan()[0] for _ in range(experts)]
    torch.manual_seed(1)
    vae = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    more = {}
    if experts == 2:
        for parameter in models[1].parameters():
            parameter.data.mul_(1.1)
        more = {"transformer_2": models[1], "boundary_ratio": 0.8}
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=models[0],
        **more,
    )
    return pipe, {**_texts(7), "guidance_scale": 3.0}


def wan_pipeline_of_two_experts():
    return wan_pipeline(2)


def hunyuan_pipeline():
    """Texts of 9 tokens, of which the prompt has 7 and the negative prompt 4."""
    transformer, _ = hunyuan()
    torch.manual_seed(1)
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=None,
        tokenizer_2=None,
    )
    given = {**_texts(9), "true_cfg_scale": 2.0}
    generator = torch.Generator().manual_seed(8)
    for name, tokens in (("", 7), ("negative_", 4)):
        given[f"{name}pooled_prompt_embeds"] = torch.randn(1, 8, generator=generator)
        given[f"{name}prompt_attention_mask"] = (torch.arange(9)[None] < tokens).long()
    return pipe, given


def cogvideox_pipeline():
    transformer, _ = cogvideox()
    torch.manual_seed(1)
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    pipe = diffusers.CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae.eval(),
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )
    return pipe, {**_texts(9), "guidance_scale": 3.0}
