// A real server over the simulated model, as a child process: `python` must be one that has wsbatch installed.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";

export class Server {
  static async start(...flags) {
    const server = new Server();
    await server.up(["--model", "simulated:tau_ms=5", "--port", "0", ...flags]);
    return server;
  }

  async up(flags) {
    this.flags = flags;
    this.child = spawn(process.env.PYTHON ?? "python", ["-P", "-m", "wsbatch", "serve", "--log-level", "error", ...flags], {
      stdio: ["ignore", "pipe", "inherit"],
    });
    for await (const line of createInterface(this.child.stdout)) {
      const found = line.match(/^listening on (ws:\S+)$/);
      if (found) {
        this.url = found[1];
        return;
      }
    }
    throw new Error(`the server ended before it listened: ${flags.join(" ")}`);
  }

  async stop(signal = "SIGTERM") {
    if (this.child.exitCode !== null || this.child.signalCode !== null) return;
    const exited = once(this.child, "exit");
    this.child.kill(signal);
    await exited;
  }
}

export async function collect(iterable) {
  const items = [];
  for await (const item of iterable) items.push(item);
  return items;
}
