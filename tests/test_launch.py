"""Recipes for clusters: what they start exists, and they go on, stop and requeue as they should."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from train.config import Config
from train.parse import load_toml

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "configs" / "launch"
LOOP = LAUNCH / "loop.sh"
FILES = sorted(LAUNCH.iterdir())
RECIPES = [path for path in FILES if path != LOOP]

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


def name_of(path):
    return path.name


def scripts(path):
    """The shell in a file: all of it, or the parts of a YAML that are shell."""
    if path.suffix != ".yaml":
        return [path.read_text()]
    settings = yaml.safe_load(path.read_text())
    if settings.get("kind") == "JobSet":
        (job,) = settings["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        return [shlex.join(container["command"])]
    return [settings["setup"], settings["run"]]


def arguments(path):
    """What `train.run` is given: the words after it."""
    text = "\n".join(scripts(path)).replace("\\\n", " ")
    (line,) = re.findall(r"^[^#\n]*python -m train\.run (.*)$", text, re.MULTILINE)
    return shlex.split(line.split(">>")[0].rstrip("& "))


def is_setting(flag):
    """Whether a flag such as --model.n-layers is a field of the config."""
    kind = Config
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        if name not in getattr(kind, "model_fields", {}):
            return False
        kind = kind.model_fields[name].annotation
    return True


@needs_bash
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_is_shell_or_yaml_that_parses(path):
    for script in scripts(path):
        result = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert result.returncode == 0, result.stderr
    if path.suffix != ".yaml":
        assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipes_start_runs_that_there_are_and_resume_them(path):
    words = arguments(path)
    flags = [word for word in words if re.match(r"--[a-z]", word)]
    assert "--resume" in flags and len(set(flags)) == len(flags) > 4
    for flag in flags:
        assert is_setting(flag), flag
    config = words[words.index("--config") + 1]
    load_toml(str(ROOT / config))
    # The loop looks for the checkpoint where the run writes it.
    workdir = words[words.index("--workdir") + 1]
    assert re.search(rf"WORKDIR(=|\s*value: ){re.escape(workdir)}\s", path.read_text())
    assert "configs/launch/loop.sh" in path.read_text()


def test_a_flag_that_is_no_setting_is_noticed():
    assert is_setting("--model.n-layers") and is_setting("--distributed.auto")
    assert not is_setting("--model.layers") and not is_setting("--n-layers")


def test_jobset_stops_on_what_does_not_mend_itself():
    spec = yaml.safe_load((LAUNCH / "gke.yaml").read_text())["spec"]
    (job,) = spec["replicatedJobs"]
    pods = job["template"]["spec"]
    (rule,) = pods["podFailurePolicy"]["rules"]
    (container,) = pods["template"]["spec"]["containers"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 2]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    # As Kubernetes demands it for a pod failure policy; and a chip for each place in the topology.
    assert pods["template"]["spec"]["restartPolicy"] == "Never"
    topology = pods["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = eval(topology.replace("x", "*"))
    assert pods["completions"] * container["resources"]["limits"]["google.com/tpu"] == chips
    assert pods["parallelism"] == pods["completions"]


@pytest.fixture
def workdir(tmp_path):
    """A run of 7 steps that has saved nothing yet, but its config."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(Config(num_steps=7).model_dump_json(indent=2) + "\n")
    return folder


def fake_train(folder, codes, last_code_is_done=True):
    """A command that ends with these exit codes, one a start; with the last one the run is done."""
    folder.mkdir(exist_ok=True)
    (folder / "codes").write_text(" ".join(map(str, codes)))
    saves = 'mkdir -p "$WORKDIR/checkpoints/7"' if last_code_is_done else ":"
    script = folder / "train"
    script.write_text(
        f"""#!/usr/bin/env bash
        read -r code rest < {folder}/codes
        echo "$@" >> {folder}/starts
        [[ -n $rest ]] || {saves}
        echo "${{rest:-$code}}" > {folder}/codes
        exit "$code"
        """
    )
    script.chmod(0o755)
    return script


def starts(folder):
    return (folder / "starts").read_text().splitlines()


def environment(workdir, **more):
    return os.environ | {"WORKDIR": str(workdir), "PAUSE": "0", "RESTARTS": "5"} | more


@needs_bash
@pytest.mark.parametrize(
    "codes, done, expected, count",
    [
        ([0], True, 0, 1),
        ([134, 3, 137, 0], True, 0, 4),
        ([0, 0, 0], True, 0, 3),  # stopped by a signal to another process, then done
        ([3, 1], False, 1, 2),
        ([2], False, 2, 1),
        ([1], True, 1, 1),
        ([3], False, 3, 6),  # for ever: gives up
        ([0], False, 143, 6),
    ],
)
def test_loop_starts_again_until_the_run_is_done_or_cannot_be(
    tmp_path, workdir, codes, done, expected, count
):
    train = fake_train(tmp_path / "bin", codes, done)
    result = subprocess.run(
        [LOOP, train, "--resume", "two words"], env=environment(workdir), capture_output=True
    )
    assert result.returncode == expected, result.stderr
    assert starts(tmp_path / "bin") == ["--resume two words"] * count


@needs_bash
def test_loop_needs_to_know_the_workdir(tmp_path):
    train = fake_train(tmp_path / "bin", [0])
    env = {name: value for name, value in os.environ.items() if name != "WORKDIR"}
    result = subprocess.run([LOOP, train], env=env, capture_output=True, text=True)
    assert result.returncode not in (0, 2) and "--workdir" in result.stderr
    assert not (tmp_path / "bin" / "starts").exists()


@needs_bash
@pytest.mark.parametrize("finishes, expected", [(False, 143), (True, 0)])
def test_loop_passes_sigterm_on_waits_and_says_143(tmp_path, workdir, finishes, expected):
    """The run saves for a while after the signal and ends with 0, as `train.run` does."""
    saves = f"mkdir -p {workdir}/checkpoints/7" if finishes else ":"
    train = tmp_path / "train"
    train.write_text(
        f"""#!/usr/bin/env bash
        trap 'sleep 0.5; touch {tmp_path}/saved; {saves}; exit 0' TERM
        touch {tmp_path}/started
        while true; do sleep 0.05; done
        """
    )
    train.chmod(0o755)
    loop = subprocess.Popen([LOOP, train], env=environment(workdir))
    wait_for(tmp_path / "started")
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(timeout=20) == expected
    assert (tmp_path / "saved").exists()


@needs_bash
def test_loop_ends_at_once_while_it_waits_to_start_again(tmp_path, workdir):
    train = fake_train(tmp_path / "bin", [3])
    loop = subprocess.Popen([LOOP, train], env=environment(workdir, PAUSE="60"))
    wait_for(tmp_path / "bin" / "starts")
    time.sleep(0.5)  # until it pauses
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(timeout=20) == 143
    assert len(starts(tmp_path / "bin")) == 1


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def fake(folder, name, body):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@needs_bash
@pytest.mark.parametrize(
    "codes, restarts, requeued", [([3], 0, True), ([3], 100, False), ([2], 0, False)]
)
def test_slurm_requeues_what_can_go_on(tmp_path, codes, restarts, requeued):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    folder = tmp_path / "bin"
    train = fake_train(folder, codes, last_code_is_done=False)
    fake(folder, "srun", f'exec {train} "$@"')
    fake(folder, "scontrol", f'echo "$@" >> {tmp_path}/scontrol')
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    result = subprocess.run(
        [LAUNCH / "slurm.sbatch"],
        env=os.environ | env | {"SLURM_RESTART_COUNT": str(restarts)},
        cwd=tmp_path,
        capture_output=True,
    )
    assert result.returncode == codes[0]
    assert len(starts(folder)) == 1  # the queue is the loop
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 42\n"


@needs_bash
@pytest.mark.skipif(shutil.which("setsid") is None, reason="no setsid here")
def test_cloud_tpu_starts_a_loop_that_outlives_ssh_and_stops_it(tmp_path):
    home = tmp_path / "home"
    python = home / "jaxamp" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (home / "jaxamp" / "configs").symlink_to(ROOT / "configs")
    fake(
        python.parent,
        "python",
        'trap "exit 0" TERM\necho "$@" > args\nwhile true; do sleep 0.05; done',
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    fake(folder, "gcloud", f'echo "$@" >> {tmp_path}/gcloud\nHOME={home} bash -c "${{@: -1}}"')
    path = f"{folder}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "SHARED": str(tmp_path)}
    command = [LAUNCH / "cloud_tpu.sh", "my-tpu", "us-east1-c"]
    subprocess.run(command, env=env, check=True, timeout=20)
    wait_for(home / "jaxamp" / "args")
    assert "--resume --distributed.auto" in (home / "jaxamp" / "args").read_text()
    pid = int((home / "jaxamp" / "train.pid").read_text())
    subprocess.run([*command, "stop"], env=env, check=True, timeout=20)
    for _ in range(400):
        if not is_running(pid):
            break
        time.sleep(0.02)
    assert not is_running(pid)
    assert (tmp_path / "gcloud").read_text().count("ssh my-tpu --zone us-east1-c --worker all") == 2


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_config_json_is_written_as_the_loop_reads_it():
    text = Config(num_steps=7).model_dump_json(indent=2)
    assert json.loads(text)["num_steps"] == 7 and '\n  "num_steps": 7,\n' in text
