// The page: asks the agent once a second and says what it has answered, or that it does not answer.

(() => {
  const POLL_SECONDS = 1;
  const PATIENCE_SECONDS = 4;
  const KEPT_POINTS = 3000;
  const PHASES = ["detect", "stop", "rendezvous", "start", "restore", "first_step"];
  const CELLS = {
    running: ["ok", "●", "running"],
    starting: ["busy", "◐", "starting"],
    draining: ["busy", "▼", "draining"],
    finished: ["quiet", "✓", "finished"],
    drained: ["quiet", "✓", "drained"],
    failed: ["bad", "✕", "failed"],
    stopped: ["quiet", "■", "stopped"],
    elsewhere: ["quiet", "○", "known to its own node"],
  };
  const byId = (id) => document.getElementById(id);
  const shown = {}; // what each part was last made from
  let columns = [];
  let points = [];
  let commits = {};
  let status = null;
  let skew = 0; // the agent's clock less ours
  let answeredAt = 0;
  let onlyRecent = false;

  const charts = {
    loss: new Chart(byId("charts"), {
      title: "Loss by step", name: "loss", show: ([step, loss], told) => (told ? `step ${number(step)}: ${number(loss, 4)}` : number(loss, 4)),
    }),
    pace: new Chart(byId("charts"), {
      title: "Seconds a step", name: "pace", onTime: true, fromZero: true, clip: true,
      show: ([at, seconds], told) => (told ? `${clock(at, true)}: ${duration(seconds)}` : duration(seconds)),
    }),
    world: new Chart(byId("charts"), {
      title: "World size", name: "world", onTime: true, fromZero: true, whole: true, steps: true,
      show: ([at, ranks], told) => (told ? `${clock(at, true)}: ${ranks} ranks` : `${ranks} ranks`),
    }),
  };

  const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
  const agentNow = () => Date.now() / 1000 + skew;
  const ago = (unix) => el("time", { "data-at": unix, title: new Date(unix * 1000).toLocaleString() }, agoText(unix));
  const agoText = (unix) => (agentNow() - unix < 1.5 ? "just now" : `${duration(Math.round(agentNow() - unix))} ago`);
  const maximum = (values) => values.reduce((best, value) => (value !== null && (best === null || value > best) ? value : best), null);

  function render(part, data, make) {
    const key = JSON.stringify(data);
    if (shown[part] === key) return;
    shown[part] = key;
    byId(part).replaceChildren(...make(data).filter(Boolean));
  }

  // -- what it all means, in one word and one sentence

  function verdict() {
    const last = status.incidents[status.incidents.length - 1];
    const stepping = status.workers.filter((worker) => worker.step !== null);
    const isOpen = last && last.seconds.total === null && (status.state !== "running" || stepping.length > 0);
    const quiet = maximum(stepping.map((worker) => worker.age_seconds));
    const pace = latest("step_seconds") || 0;
    switch (status.state) {
      case "closed":
        return closed();
      case "draining":
        return ["busy", "Draining", "All ranks save after the same step, then stop."];
      case "waiting":
        return ["warn", "Waiting", status.waiting.map((node) => `${node.node_id}: ${node.reason}`).join("; ")];
      case "spare":
        return ["quiet", "Spare", "There are as many nodes as the job takes; this one stands by."];
      default:
    }
    if (isOpen) return ["busy", "Recovering", `${brief(last.cause)}, ${agoText(last.time)}.`];
    if (status.state === "running" && quiet !== null && quiet > Math.max(60, 10 * pace)) {
      const behind = stepping.find((worker) => worker.age_seconds === quiet);
      return ["warn", "No progress", `Rank ${behind.rank} has shown none for ${duration(quiet)}, at step ${number(behind.step)}.`];
    }
    if (status.state === "running") return ["ok", "Training", last ? recovered(last) : "Nothing has gone wrong since this agent began."];
    if (status.state === "starting") return ["busy", "Starting", `Round ${status.round}: the workers are on their way to the first step.`];
    if (status.state === "joining") return ["busy", "Joining", "Looking for the other nodes of the job."];
    return ["busy", "Stopped", "No worker runs here; the next round has not begun."];
  }

  function closed() {
    const failure = status.last_failure;
    if (status.outcome === "succeeded") return ["ok", "Finished", "Trained to the end."];
    if (status.outcome === "drained") return ["quiet", "Drained", "The stop step is saved. Run it again to go on."];
    return ["bad", "Failed", failure ? `${who(failure)} ${headline(failure)}` : "The job has ended; the agent's log says why."];
  }

  function recovered(incident) {
    const back = incident.seconds.total === null ? "Training again" : `Training again after ${duration(incident.seconds.total)}`;
    const lost = incident.lost_steps === null ? "" : incident.lost_steps ? `; ${plural(incident.lost_steps, "step")} repeated` : "; no step was lost";
    return `${brief(incident.cause)}, ${agoText(incident.time)}. ${back}${lost}.`;
  }

  const sentence = (cause) => (cause ? cause[0].toUpperCase() + cause.slice(1) : "Something happened");
  const brief = (cause) => { // for a sentence to go on after it
    const text = sentence(cause).replace(/[.\s]+$/, "");
    return text.length > 140 ? `${text.slice(0, 139)}…` : text;
  };
  const headline = (failure) => { // as FailureStatus.headline
    const first = failure.message.split("\n")[0];
    return first.startsWith(failure.reason) ? first : first ? `${failure.reason}: ${first}` : failure.reason;
  };
  const who = (failure) => (failure.rank === null ? failure.node_id : `Rank ${failure.rank} on ${failure.node_id}`);

  function sayVerdict() {
    const [tone, word, story] = verdict();
    const step = maximum(status.workers.map((worker) => worker.step));
    document.body.dataset.tone = tone;
    set("word", word);
    set("story", story);
    set("job", status.run_id);
    set("node", `node ${status.node_id} · round ${status.round}`);
    const title = `${word}${step === null ? "" : ` · step ${number(step)}`} · ${status.run_id}`;
    if (document.title !== title) document.title = title;
    const colour = { ok: "1a7f53", busy: "2563a8", warn: "c98600", bad: "b3261e", quiet: "7a837d" }[tone];
    const icon = `data:image/svg+xml,%3Csvg xmlns='${SVG}' viewBox='0 0 8 8'%3E%3Ccircle cx='4' cy='4' r='3.6' fill='%23${colour}'/%3E%3C/svg%3E`;
    if (byId("icon").getAttribute("href") !== icon) byId("icon").setAttribute("href", icon);
  }

  function set(id, text) {
    if (byId(id).textContent !== text) byId(id).textContent = text;
  }

  // -- figures

  const at = (name) => columns.indexOf(name);
  const latest = (name) => (points.length ? points[points.length - 1][at(name)] : null);

  function sayFigures() {
    const step = maximum(status.workers.map((worker) => worker.step));
    const left = Math.max(0, status.restarts.limit - status.restarts.used);
    const goodput = latest("goodput");
    const rate = stepRate();
    const tiles = [
      ["Step", number(step), rate === null ? "" : `${number(rate, 2)} a second`],
      ["Seconds a step", duration(latest("step_seconds")), ""],
      ["Loss", number(latest("loss"), 4), ""],
      ["World size", number(status.world_size), plural(status.nodes.length, "node")],
      ["Goodput", goodput === null ? "–" : `${number(goodput * 100, 3)} %`, "of the time so far"],
      ["Failures left", number(left), `of ${status.restarts.limit} in ${duration(status.restarts.window_seconds)}`,
        status.restarts.limit && left === 0 ? "bad" : status.restarts.limit && left === 1 ? "warn" : ""],
    ];
    render("tiles", tiles, (rows) => rows.map(([name, value, note, tone]) =>
      el("div", { "data-tone": tone || null }, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null))));
  }

  function stepRate() {
    const recent = points.slice(-30).filter((point) => point[at("step")] !== null && point[at("round")] === status.round);
    if (recent.length < 2) return null;
    const [first, last] = [recent[0], recent[recent.length - 1]];
    return (last[at("step")] - first[at("step")]) / (last[at("time")] - first[at("time")]);
  }

  // -- ranks

  function sayRanks() {
    const local = new Map(status.workers.map((worker) => [worker.rank, worker]));
    const rows = status.nodes.map((node) => ({
      ...node,
      here: node.node_id === status.node_id,
      workers: node.ranks.map((rank) => (node.node_id === status.node_id && local.get(rank)) || { rank, state: "elsewhere", step: null }),
    }));
    const waiting = status.waiting.map((node) => ({ ...node, here: false, workers: [] }));
    const small = status.world_size > 64;
    render("ranks", [rows, waiting, small], () => [
      ...(rows.length || waiting.length ? [] : [el("p", { class: "nothing" }, "No round has been formed yet.")]),
      ...rows.map((node) => nodeRow(node, small)),
      ...waiting.map((node) => el("div", { class: "node" }, el("h3", {}, node.node_id, el("small", {}, "waits")), el("p", { class: "nothing" }, node.reason))),
    ]);
    const states = [...new Set(rows.flatMap((node) => node.workers.map((worker) => worker.state)))];
    render("ranks-legend", states.length > 1 ? states : [], (several) => several.map((state) => el("span", {}, `${CELLS[state][1]} ${CELLS[state][2]}`)));
  }

  function nodeRow(node, small) {
    const page = node.http && !node.here ? el("a", { href: `${location.protocol}//${node.http}/` }, "its page") : node.here ? "this node" : node.addr;
    return el("div", { class: small || !node.here ? "node small" : "node" },
      el("h3", {}, node.node_id, el("small", {}, page)),
      el("ul", { class: "cells", "aria-label": `ranks on ${node.node_id}` }, node.workers.map(cell)));
  }

  function cell(worker) {
    const [tone, sign, word] = CELLS[worker.state] || ["quiet", "?", worker.state];
    const slow = worker.slowdown !== null && worker.slowdown !== undefined && worker.slowdown >= 1.15;
    const lines = [worker.step === null ? word : worker.state === "running" ? `step ${number(worker.step)}` : `${word}, ${number(worker.step)}`];
    const label = `rank ${worker.rank}: ${word}${worker.step === null ? "" : `, step ${worker.step}`}${slow ? `, ${worker.slowdown} times as slow as the median` : ""}`;
    return el("li", { class: "cell", "data-rank": worker.rank, "data-state": worker.state, "data-tone": slow && tone === "ok" ? "warn" : tone, title: label, "aria-label": label },
      el("b", {}, worker.rank, el("i", { "aria-hidden": true }, sign)),
      lines.map((line) => el("span", {}, line)),
      slow ? el("span", { class: "slow" }, ` ${number(worker.slowdown, 2)}× the median`) : null);
  }

  // -- curves

  function sayCurves() {
    const since = onlyRecent ? agentNow() - 600 : 0;
    const rows = points.filter((point) => point[at("time")] >= since);
    const [time, step, loss, pace, world, state] = ["time", "step", "loss", "step_seconds", "world_size", "state"].map(at);
    const forward = [];
    for (const point of rows) {
      if (point[step] === null || point[loss] === null) continue;
      while (forward.length && forward[forward.length - 1][0] >= point[step]) forward.pop(); // repeated: the newer one counts
      forward.push([point[step], point[loss]]);
    }
    const times = status.incidents.map((incident) => incident.time);
    const steps = times.map((when) => rows.filter((point) => point[time] <= when && point[step] !== null).pop()).filter(Boolean).map((point) => point[step]);
    const downs = [];
    rows.forEach((point, index) => {
      const next = rows[index + 1];
      if (next && !["running", "draining"].includes(point[state])) downs.push([point[time], next[time]]);
    });
    charts.loss.draw({ rows: forward, events: steps });
    charts.pace.draw({ rows: rows.map((point) => [point[time], point[pace]]), events: times, downs });
    charts.world.draw({ rows: rows.map((point) => [point[time], point[world]]), events: times, downs });
  }

  // -- incidents and what is safe

  function sayIncidents() {
    render("incidents", status.incidents, (incidents) => (incidents.length
      ? [el("ol", { class: "plain" }, [...incidents].reverse().map(incidentItem))]
      : [el("p", { class: "nothing" }, "None since this agent began.")]));
    render("failure", status.last_failure, (failure) => (failure
      ? [el("details", {}, el("summary", {}, `Last failure: ${who(failure)} ${failure.reason}${failure.signal ? ` (${failure.signal})` : failure.exit_code === null ? "" : ` (exit code ${failure.exit_code})`}`),
          el("pre", {}, [failure.message, failure.log].filter(Boolean).join("\n\n")))]
      : []));
  }

  function incidentItem(incident) {
    const parts = PHASES.filter((phase) => incident.seconds[phase] !== null).map((phase) => [phase, incident.seconds[phase]]);
    const total = incident.seconds.total;
    const sum = parts.reduce((all, [, seconds]) => all + seconds, 0);
    const words = parts.map(([phase, seconds]) => `${phase.replace("_", " ")} ${duration(seconds)}`);
    const bar = el("div", { class: "phases", role: "img", "aria-label": words.join(", ") }, parts.map(([phase, seconds]) => {
      const part = el("span", { class: "seg", "data-phase": phase });
      part.style.flexGrow = String((100 * seconds) / (sum || 1)); // less than 1 in all would leave room
      return part;
    }));
    return el("li", { class: "incident" },
      el("p", { class: "head" }, el("span", {}, sentence(incident.cause)), ago(incident.time)),
      el("p", { class: "cost" }, total === null ? "not over yet" : el("b", {}, `back in ${duration(total)}`),
        incident.lost_steps === null ? "" : ` · ${incident.lost_steps ? `${plural(incident.lost_steps, "step")} repeated` : "no step lost"}`,
        incident.round ? ` · round ${incident.round}` : ""),
      parts.length ? bar : null,
      parts.length ? el("p", { class: "keys" }, parts.map(([phase], index) => el("span", { "data-phase": phase }, words[index]))) : null);
  }

  function sayCheckpoints() {
    const step = maximum(status.workers.map((worker) => worker.step));
    const tier = (name, safe, commit, risk) => ({ name, safe, commit: commit || null, text: safe === null || step === null ? null : risk(Math.max(0, step - safe)) });
    const tiers = [
      tier("On disk", status.checkpoint.disk_step, commits.disk, (count) => (count ? `${plural(count, "step")} newer: lost if every node stopped now` : "everything is on disk")),
      tier("In memory", status.checkpoint.memory_step, commits.memory, (count) => (count ? `${plural(count, "step")} to repeat if a worker died now` : "nothing to repeat if a worker died now")),
    ];
    const failed = status.checkpoint.failed_saves;
    tiers[0].warning = failed ? `${plural(failed, "save")} failed since: the workers' logs say why` : "";
    render("checkpoints", tiers, () => [el("dl", { class: "safe" }, tiers.map((each) => el("div", {},
      el("dt", {}, each.name),
      el("dd", {}, el("b", {}, each.safe === null ? "nothing yet" : `step ${number(each.safe)}`),
        each.commit && each.safe !== null ? el("p", {}, ago(each.commit)) : null,
        each.warning ? el("p", { class: "warning" }, each.warning) : null,
        each.text === null ? null : el("p", {}, each.text)))))]);
  }

  // -- asking

  async function ask(path) {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_SECONDS * 1000) });
    if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
    return answer.json();
  }

  async function poll() {
    const newest = points.length ? points[points.length - 1][0] : 0;
    const [nextStatus, news] = await Promise.all([ask("status"), ask(`points?after=${newest}`)]);
    if (status && status.incarnation !== nextStatus.incarnation) points = []; // another agent: its own past
    status = nextStatus;
    columns = news.columns;
    commits = news.commits;
    points = points.concat(news.points);
    if (points.length > KEPT_POINTS) points = []; // asked for anew, thinned by the agent
    skew = news.now - Date.now() / 1000;
    answeredAt = Date.now();
    if (points.length) say();
  }

  function say() {
    sayVerdict();
    sayFigures();
    sayRanks();
    sayCurves();
    sayIncidents();
    sayCheckpoints();
    document.body.dataset.live = "yes";
  }

  function sayAnswers(error) {
    const silent = answeredAt ? (Date.now() - answeredAt) / 1000 : null;
    const lost = byId("lost");
    const isLost = error !== null && (silent === null || silent > 2.5);
    if (isLost && document.body.dataset.live !== "no") {
      const isOver = status !== null && status.state === "closed";
      const seen = silent === null ? "" : ` What you see is of ${clock(answeredAt / 1000 + skew, true)}.`;
      lost.textContent = isOver ? `The agent has ended with the job.${seen}` : `The agent does not answer.${seen}`;
      if (!isOver) {
        set("story", status === null ? "" : `When it last did: ${verdict()[1]}.`);
        set("word", "No answer");
        document.body.dataset.tone = "bad";
        document.title = `No answer · ${status === null ? "elasticd" : status.run_id}`;
      }
      document.body.dataset.live = "no";
    }
    if (!isLost) lost.textContent = "";
    lost.hidden = !isLost;
    set("clock", `· ${clock(agentNow(), true)}`);
    for (const node of document.querySelectorAll("time[data-at]")) {
      const text = agoText(Number(node.dataset.at));
      if (node.textContent !== text) node.textContent = text;
    }
  }

  async function keepAsking() {
    for (;;) {
      let error = null;
      try {
        if (!document.hidden || !status) await poll();
      } catch (caught) {
        error = caught;
      }
      sayAnswers(error);
      await new Promise((resolve) => setTimeout(resolve, POLL_SECONDS * 1000));
    }
  }

  for (const [id, recent] of [["recent", true], ["whole", false]]) {
    byId(id).addEventListener("click", () => {
      onlyRecent = recent;
      byId("recent").setAttribute("aria-pressed", String(recent));
      byId("whole").setAttribute("aria-pressed", String(!recent));
      if (status) sayCurves();
    });
  }
  keepAsking();
})();
