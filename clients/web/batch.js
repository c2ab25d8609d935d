/** The panel of the live batch: its numbers, its timeline, and requests to fill it with. */

import { Timeline } from "./timeline.js";

const show = (id, text) => (document.getElementById(id).textContent = text);
const percent = (share) => (share === undefined ? "–" : `${Math.round(100 * share)} %`);

export class BatchPanel {
  #section = document.getElementById("batch");
  #canvas = document.getElementById("timeline");
  #timeline = new Timeline(this.#canvas);
  #labelledAt = 0;

  /** Watch this client's server, where it allows that, until the connection ends. */
  async follow(client) {
    this.#section.hidden = !client.hello.watch;
    if (!client.hello.watch) return;
    this.#timeline.reset();
    try {
      for await (const frame of client.watch()) this.#show(frame);
    } catch {
      // The connection has ended: the link says so.
    }
  }

  #show(frame) {
    show("n-scheduler", frame.scheduler);
    show("n-running", `${frame.running} of ${frame.slots}`);
    show("n-queue", frame.queue_depth);
    show("n-rate", frame.tokens_per_s.toFixed(frame.tokens_per_s < 100 ? 1 : 0));
    show("n-utilization", percent(frame.slot_utilization));
    show("n-waste", percent(frame.waste_fraction));
    this.#timeline.take(frame);
    // In words for those who do not see the canvas; now and then, for it is read out.
    if (performance.now() - this.#labelledAt > 2000 || frame.running === 0) {
      this.#labelledAt = performance.now();
      this.#canvas.setAttribute(
        "aria-label",
        `One line for each slot of the batch: ${frame.running} of ${frame.slots} are running, ${frame.queue_depth} wait`,
      );
    }
  }
}

/** Requests whose answers nobody reads, to see how a batch takes them: short and long ones, arriving together. */
export class LoadPanel {
  #link;
  #generations = new Set();
  #stopped = false;
  #form = document.getElementById("load");
  #start = document.getElementById("load-start");
  #stop = document.getElementById("load-stop");
  #state = document.getElementById("load-state");

  constructor(link) {
    this.#link = link;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run(Number(document.getElementById("load-count").value));
    });
    this.#stop.addEventListener("click", () => {
      this.#stopped = true;
      for (const generation of this.#generations) generation.cancel();
    });
  }

  async #run(count) {
    const client = this.#link.client;
    if (!client?.open) return;
    this.#stopped = false;
    this.#setBusy(true);
    let left = count;
    let failed = 0;
    const tell = () => (this.#state.value = `${left} to go${failed > 0 ? `, ${failed} refused` : ""}`);
    tell();
    const one = async (index) => {
      try {
        // Most answers are short and a few are long, as in life.
        const max_tokens = index % 4 === 0 ? 160 + 24 * (index % 5) : 12 + 9 * (index % 7);
        const prompt = "Tell me about the number ".repeat(1 + (index % 6)) + index;
        const request = { prompt, max_tokens, ignore_eos: true, seed: index, temperature: 1 };
        const generation = client.generate(request, { retries: 3 });
        this.#generations.add(generation);
        if (this.#stopped) generation.cancel();
        await generation.completion().finally(() => this.#generations.delete(generation));
      } catch {
        failed += 1;
      }
      left -= 1;
      tell();
    };
    await Promise.all(Array.from({ length: count }, (_, index) => one(index)));
    this.#state.value = failed > 0 ? `${failed} of ${count} were refused or lost` : "";
    this.#setBusy(false);
  }

  #setBusy(busy) {
    this.#start.disabled = busy;
    this.#stop.disabled = !busy;
  }
}
