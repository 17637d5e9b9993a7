// node trace_processor.cjs FOLDER SOCKET: what `trace_processor server unix` does, with the WebAssembly that Perfetto's
// page runs in a browser: FOLDER has engine_bundle.js and trace_processor*.wasm. It ends with its client.
const fs = require("node:fs"), net = require("node:net"), path = require("node:path"), vm = require("node:vm");
const [folder, socket] = process.argv.slice(2), exit = process.exit, port = {};
class XMLHttpRequest {
  open(method, url) { this.response = fs.readFileSync(path.join(folder, path.basename(url))); }
  send() {}
}
console.log = console.warn = () => {};
Object.assign(globalThis, {process: undefined, self: globalThis, WorkerGlobalScope: Object, XMLHttpRequest});
globalThis.location = {href: "http://localhost/"};
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
self.onmessage({data: port});
net.createServer(client => {
  port.postMessage = bytes => client.write(bytes);
  client.on("data", bytes => port.onmessage({data: new Uint8Array(bytes)}));
  client.on("close", () => exit());
}).listen(socket);
