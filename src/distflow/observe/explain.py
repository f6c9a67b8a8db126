"""Explains each metric in a sentence: shown by the page, and the table in docs/page.md."""

from fnmatch import fnmatchcase

# Pattern → sentence; the first that matches counts. `*` is any text.
SENTENCES = {
    "reward/mean": "Mean score of the responses; if it does not rise, nothing is learned.",
    "reward/trained_mean": "Mean score of the responses that were trained on, after dynamic sampling has dropped some.",
    "reward/std": "Mean standard deviation of the scores within a group; at 0 there is nothing to compare.",
    "reward/zero_std_frac": "Share of groups whose responses all have the same score; if it is high, most of the work "
    "teaches nothing: the prompts are too easy or too hard.",
    "reward/failures": "Samples on which the reward function failed; if it is not 0, look at the function.",
    "reward/restarts": "Processes of the reward function that were killed and started again; if it rises, it hangs.",
    "reward/overlong_penalty": "Mean penalty for responses near the limit of their length.",
    "reward/min": "Lowest score of the step.",
    "reward/max": "Highest score of the step.",
    "reward/*": "Mean score of one reward function, of one key that it returns, or of one data source.",
    "advantage/*/baseline": "Moving average of the scores of a role, which its advantages are relative to.",
    "advantage/*": "Mean advantage; about 0 where groups are compared with their own mean.",
    "actor/loss": "The loss that is minimised; its level says little, a sudden jump says much.",
    "actor/pg_loss": "The policy-gradient part of the loss.",
    "actor/kl": "Divergence from the reference model; if it rises quickly, the policy runs away from it.",
    "actor/ppo_kl": "Divergence of the policy from the one that generated; above 0.1 the updates of a step are large.",
    "actor/ratio": "Mean importance ratio of the new to the old policy; far from 1 the samples are off-policy.",
    "actor/clip_frac": "Share of tokens whose ratio was clipped; if it is high, lower the learning rate or do fewer "
    "updates per step.",
    "actor/entropy": "Mean entropy of the policy per token; if it falls to 0, all responses become the same.",
    "actor/entropy_weight": "Weight of the entropy bonus, which follows the entropy; 0 while that is above its target.",
    "actor/grad_norm": "Norm of the gradient before clipping; spikes come before a collapse.",
    "*/grad_norm": "Norm of the gradient before clipping.",
    "*/lr": "The learning rate.",
    "*/skipped_updates": "Updates that were skipped because the gradient was not finite.",
    "critic/vf_loss": "Loss of the critic; if it does not fall, the advantages are noise.",
    "critic/explained_variance": "Share of the returns' variance that the critic predicts; below 0 it is worse than "
    "a constant.",
    "critic/*": "A quantity of the critic.",
    "actor/*": "A quantity of the loss, as a mean over tokens.",
    "response_length/clip_ratio": "Share of responses cut off at rollout.max_tokens; if it rises, the model rambles or "
    "the limit is too low.",
    "response_length/max": "Tokens of the longest response; the slowest worker of a rollout waits for it.",
    "response_length/mean": "Mean tokens of a response; a steady rise without more reward is length hacking.",
    "rollout/mismatch_kl": "Divergence between the log-probs of the engine and of the trainer for the same tokens; "
    "above 0.01 they disagree and training may collapse.",
    "rollout/mismatch_max": "Largest difference between the two log-probs of one token.",
    "rollout/staleness": "How many updates old the weights are that generated the samples; 0 is on-policy.",
    "rollout/carried_frac": "Fraction of the response tokens that earlier steps have generated, with older weights.",
    "rollout/*": "A quantity of the generation.",
    "router/load_max_ratio": "Load of the busiest expert of any layer over the mean of its layer; 1 is even.",
    "router/starved_frac": "Share of the experts that get under a tenth of the mean load: they learn next to nothing.",
    "router/mismatch": "Share of the experts that the rollout has chosen and training would not have; it uses them "
    "nevertheless.",
    "router/aux_loss": "The loss that evens out the load of experts, before its weight; 1 is even.",
    "distill/reverse_kl": "How far the student is from the teacher, on its own responses: what is to fall.",
    "distill/divergence": "The divergence from the teacher per token: what is to fall.",
    "sampling/rounds": "Rounds of dynamic sampling that filled the step; if it rises, most groups have no signal.",
    "sampling/discarded": "Groups that dynamic sampling has dropped.",
    "sampling/filled": "Groups that were kept although they have no signal, since no round was left.",
    "record/failed_writes": "Writes to logs and trackers that failed, on all workers: the disk may be full.",
    "data/bytes_sent*": "Bytes a worker sent to others in the step: the mean, or the maximum (`_max`).",
    "data/bytes_received*": "Bytes a worker received from others.",
    "data/bytes_local*": "Bytes that stayed on their worker; the more, the better the placement.",
    "data/imbalance": "(max − min) / mean of tokens per worker; the one with most tokens is waited for.",
    "perf/tokens_per_s": "Generated tokens per second of the whole step, over all workers.",
    "perf/tokens": "Generated tokens of the step.",
    "perf/cpu_s": "CPU seconds of all workers.",
    "perf/peak_mib": "Peak memory of the worker that has most; if it creeps up, something leaks.",
    "perf/device_peak_mib": "Peak memory on the device of the worker that has most.",
    "perf/work_s": "Mean seconds a worker spent in nodes; the rest of the step it moved data or waited.",
    "perf/slowest_rank": "The rank whose nodes took longest; always the same one is a straggler.",
    "perf/straggle": "Time of the slowest worker over the mean; at 2 half of the fleet's time is lost.",
    "timing_s/step": "Mean seconds of a step.",
    "timing_max_s/step": "Seconds of a step on the slowest worker.",
    "timing_s/*": "Mean seconds that a worker spent in this node or task, waiting included.",
    "timing_max_s/*": "Seconds that the slowest worker spent in this node or task.",
    "val/*/pass@*": "Chance that at least one of k responses to a held-out prompt is right.",
    "val/*/score": "Mean score on held-out prompts: the number that counts.",
    "val/*": "A quantity on held-out prompts.",
}


def explain(metric: str) -> str:
    """Returns the sentence for a metric, empty if it is a user's own."""
    return next((text for pattern, text in SENTENCES.items() if fnmatchcase(metric, pattern)), "")
