"""The formula of each loss for docs/reference/losses.md, in TeX, with its place in the paper.

Symbols are defined on the page: r is the log ratio of a response, z the margin r_w - r_l, n the tokens of a response.
"""

from __future__ import annotations

PAPERS = {
    "2305.18290": "DPO",
    "2403.00409": "rDPO",
    "2305.10425": "SLiC-HF",
    "2309.06657": "RSO",
    "2310.12036": "IPO",
    "2402.00856": "EXO",
    "2402.05369": "NCA",
    "2404.04656": "BCO",
    "2405.00675": "SPPO",
    "2406.05882": "AOT",
    "2408.06266": "APO",
    "2406.08414": "DiscoPOP",
    "2411.15124": "Tülu 3",
    "2402.13228": "DPOP",
    "2405.14734": "SimPO",
    "2501.03884": "AlphaPO",
    "2403.07691": "ORPO",
    "2401.08417": "CPO",
    "2411.10442": "MPO",
    "2402.01306": "KTO",
    "2502.00203": "RPO",
    "2203.02155": "InstructGPT",
}

# loss: formula, where it is from and what else to know
FORMULAS: dict[str, tuple[str, str]] = {
    "sigmoid": (
        r"-(1 - \varepsilon) \log \sigma(\beta z) - \varepsilon \log \sigma(-\beta z)",
        "Equation 7 of the paper. ε is `label_smoothing`, the share of flipped labels "
        "([cDPO](https://ericmitchell.ai/cdpo.pdf)).",
    ),
    "robust": (
        r"\frac{-(1 - \varepsilon) \log \sigma(\beta z) + \varepsilon \log \sigma(-\beta z)}{1 - 2 \varepsilon}",
        "Section 3 of the paper. ε is `label_smoothing`, below one half: there, labels carry no information.",
    ),
    "hinge": (
        r"\max(0, 1 - \beta z)",
        "On normalized likelihoods, as in [RSO](https://arxiv.org/abs/2309.06657).",
    ),
    "ipo": (
        r"(r_w / n_w - r_l / n_l - 1 / (2 \beta))^2",
        "Equation 17 of the paper, each side divided by its length.",
    ),
    "ipo_sum": (
        r"(z - 1 / (2 \beta))^2",
        "Equation 17 of the paper verbatim. Long responses weigh more than in [`ipo`](#ipo).",
    ),
    "exo_pair": (
        r"\sigma(\beta z) (\log \sigma(\beta z) - \log (1 - \varepsilon))"
        r" + \sigma(-\beta z) (\log \sigma(-\beta z) - \log \varepsilon)",
        "Equation 16 of the paper. ε is `label_smoothing`, above 0: the reverse KL to a one-hot label is infinite.",
    ),
    "nca_pair": (
        r"-\log \sigma(\beta r_w) - \frac{1}{2} \log \sigma(-\beta r_w) - \frac{1}{2} \log \sigma(-\beta r_l)",
        "NCA with two responses.",
    ),
    "bco_pair": (
        r"-\log \sigma(\beta r_w - \delta) - \log \sigma(-(\beta r_l - \delta))",
        "δ is the mean reward of both sides over all earlier steps, 0 at first. It cannot be set; checkpoints keep it.",
    ),
    "sppo_hard": (
        r"(r_w - 1 / (2 \beta))^2 + (r_l + 1 / (2 \beta))^2",
        "Equation 4.7 of the paper with win probabilities 1 and 0.",
    ),
    "aot": (
        r"-(1 - \varepsilon) \log \sigma(x) - \varepsilon \log \sigma(-x), \quad"
        r" x = \beta (\operatorname{sort}(\pi_w - \pi_l) - \operatorname{sort}(\pi_{0,w} - \pi_{0,l}))",
        "Paired AOT. It sorts over the whole step, so a value belongs to a quantile and not to a pair.",
    ),
    "aot_unpaired": (
        r"-(1 - \varepsilon) \log \sigma(x) - \varepsilon \log \sigma(-x), \quad"
        r" x = \beta (\operatorname{sort}(r_w) - \operatorname{sort}(r_l))",
        "Unpaired AOT. It sorts over the whole step, so a value belongs to a quantile and not to a pair.",
    ),
    "apo_zero": (
        r"1 - \sigma(\beta r_w) + \sigma(\beta r_l)",
        "Equation 7 of the paper.",
    ),
    "apo_down": (
        r"\sigma(\beta r_w) + 1 - \sigma(\beta z)",
        "Equation 8 of the paper.",
    ),
    "discopop": (
        r"-(1 - g) \log \sigma(\beta z) + g \, e^{-\beta z}, \quad g = \sigma(\beta z / \tau)",
        "Equation 5 of the paper. τ is `discopop_tau`.",
    ),
    "kto": (
        r"\lambda_D \sigma(-\beta (r - z_0)) \text{ or } \lambda_U \sigma(\beta (r - z_0))",
        "Equation 8 of the paper. z₀ is the mean log ratio of mismatched responses in "
        "the step, at least 0. The weights are `desirable_weight` and `undesirable_weight`.",
    ),
    "bco": (
        r"-\log \sigma(\beta r - \delta) \text{ or } -\log \sigma(\delta - \beta r)",
        "Each term of [`bco_pair`](#bco-pair) alone.",
    ),
    "apo_zero_unpaired": (
        r"1 - \sigma(\beta r) \text{ or } \sigma(\beta r)",
        "Each term of [`apo_zero`](#apo-zero) alone.",
    ),
    "plackett_luce": (
        r"-\sum_k \log \frac{e^{\beta r_k}}{\sum_{j \ge k} e^{\beta r_j}}",
        "Equation 20 of the paper (appendix A.3), responses from the best to the worst.",
    ),
    "infonca": (
        r"-\sum_k \mathrm{softmax}(s / \alpha)_k \log \mathrm{softmax}(\beta r)_k",
        "Equation 8 of the paper. s are the scores of the data, divided by `infonca_alpha`.",
    ),
    "dpop": (
        r"-\log \sigma(\beta (z - \lambda \max(0, -r_w)))",
        "Equation 3 of the paper's second version; in the first one, the penalty was outside the sigmoid by mistake. "
        "λ is `dpop_lambda`.",
    ),
    "sigmoid_norm": (
        r"-\log \sigma(\beta (r_w / n_w - r_l / n_l))",
        "Section 5 of the paper, which has a beta of 5: rewards are per token here, so beta is larger than for "
        "[`sigmoid`](#sigmoid).",
    ),
    "simpo": (
        r"-\log \sigma(\beta (\pi_w / n_w - \pi_l / n_l) - \gamma)",
        "Equation 6 of the paper.",
    ),
    "alphapo": (
        r"-\log \sigma(\beta (q_w - q_l) - \gamma), \quad q = \frac{1 - p^{-a}}{a}, \quad p = e^{\pi / n}",
        "As in TRL's CPOTrainer. a is `alphapo_alpha`; 0 gives [`simpo`](#simpo). Defaults are those of "
        "Mistral-Instruct in Table 3 of the paper.",
    ),
    "orpo": (
        r"-\pi_w / n_w - \beta \log \sigma(o_w - o_l), \quad o = \log \frac{p}{1 - p}, \quad p = e^{\pi / n}",
        "Equations 6 and 7 of the paper, whose λ is `beta` here.",
    ),
    "cpo": (
        r"-\log \sigma(\beta (\pi_w - \pi_l)) - c \, \pi_w / n_w",
        "Equation 3 of the paper. c is `cpo_alpha`; the NLL is a mean per token, as in the authors' code.",
    ),
    "rpo_sq": (
        r"(\beta z - \eta g)^2",
        "g is the margin column, or the difference of a list's scores, and η is `reward_scale`. As in NeMo-Aligner.",
    ),
    "rpo_bwd_kl": (
        r"\mathrm{KL}(\sigma(\eta g) \,\|\, \sigma(\beta z))",
        "Of two coins; g and η as for [`rpo_sq`](#rpo-sq).",
    ),
    "rpo_fwd_kl": (
        r"\mathrm{KL}(\sigma(\beta z) \,\|\, \sigma(\eta g))",
        "[`rpo_bwd_kl`](#rpo-bwd-kl) with the coins exchanged.",
    ),
    "bradley_terry": (
        r"-\log \sigma(s_w - s_l - m) + c (s_w + s_l)^2",
        "Equation 1 of the paper, for a [reward model](../concepts/losses.md#reward-models), whose head gives a "
        "response the score s. m is the margin column, c `center_rewards_coefficient`.",
    ),
    "sft": (
        r"-\pi_w / n_w",
        "The generation loss of MPO, averaged per response.",
    ),
}
