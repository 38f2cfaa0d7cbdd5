"""Defects of several processes: what they share, and what they agree on."""

from tests.mutations.defect import Defect

LEARNING = "tests/test_ranks.py::test_sixty_four_ranks_learn_what_one_process_learns_with_the_same_collectives_on_each"
DRAWING = "tests/test_ranks.py::test_ranks_draw_what_one_process_draws"
STOPPING = "tests/faults/test_ranks.py::test_sigterm_to_either_process_saves_the_tick_and_ends_both[6-0]"

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Processes that torchrun starts again may meet at the addresses of those before",
        "esper_lightning/cli/main.py",
        'if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":',
        'if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "Yes":',
        "tests/test_ranks.py::test_torchrun_may_start_processes_again_only_if_each_start_has_a_store_of_its_own",
    ),
    Defect(
        "A job of torchrun goes on from a run that has ended normally",
        "esper_lightning/cli/main.py",
        'content.get("job") == job_name() and not content.get("finished")',
        'content.get("job") == job_name()',
        "tests/test_ranks.py::test_a_job_that_is_started_again_finds_the_run_that_it_began",
    ),
    Defect(
        "Processes on several machines each look for a run of their own",
        "esper_lightning/provenance.py",
        "if is_on_one_machine else None",
        "if True else None",
        "tests/test_ranks.py::test_processes_that_start_again_on_several_machines_need_a_job_with_a_name",
    ),
    Defect(
        "DDP divides the gradient by the number of ranks, and nothing makes up for it",
        "esper_lightning/ranks.py",
        "return gradients[0] * ctx.world, None",
        "return gradients[0], None",
        LEARNING,
    ),
    Defect(
        "The loss of several ranks is a mean of their means",
        "esper_lightning/ppo/losses.py",
        "means = [getattr(terms, name) * learned for name in MEANS_OF_LEARNED]",
        "means = [getattr(terms, name) * learned.clamp(max=1) for name in MEANS_OF_LEARNED]",
        LEARNING,
    ),
    Defect(
        "All ranks explore with the same noise",
        "esper_lightning/tamiyo/heads.py",
        "return (weights / ranks.rows(noise)).argmax(1)",
        "return (weights / noise[: len(weights)]).argmax(1)",
        DRAWING,
    ),
    Defect(
        "Advantages are normalised by the moments of one rank",
        "esper_lightning/ppo/gae.py",
        "count, mean, variance = ranks.moments(sample)",
        "count, mean, variance = ALONE.moments(sample)",
        LEARNING,
    ),
    Defect(
        "Normalisers know the environments of one rank",
        "esper_lightning/ppo/running_norm.py",
        "n_values, mean, var = ranks.moments(",
        "n_values, mean, var = ALONE.moments(",
        LEARNING,
    ),
    Defect(
        "All ranks play the same episodes",
        "esper_lightning/ppo/collector.py",
        "self.pool.reset(self.ranks.rows(of_all))",
        "self.pool.reset(of_all[: self.pool.n_envs])",
        LEARNING,
    ),
    Defect(
        "A rank puts its own environments into the minibatches of others",
        "esper_lightning/ppo/rollout_buffer.py",
        "envs = envs[envs >= 0]",
        "envs = envs.clamp(min=0)",
        LEARNING,
    ),
    Defect(
        "A signal stops the process that gets it, and the others wait for it",
        "callbacks/preemption.py",
        "code = own_code if pl_module.ranks.world == 1 else",
        "code = own_code if True else",
        STOPPING,
    ),
)
